"""Resuming from a checkpoint: each rank fetches the elements it needs, whatever mesh, table and units wrote them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.checkpoint import rng
from shardwise.checkpoint.codec import decode, dtype_name, dtype_of
from shardwise.checkpoint.content import Content, Entry
from shardwise.checkpoint.document import read_document
from shardwise.checkpoint.folder import newest
from shardwise.checkpoint.index import Index
from shardwise.checkpoint.read import Read, Reader
from shardwise.checkpoint.same import check_same_groups, check_same_model, check_same_optimizer, settings_of
from shardwise.checkpoint.schema import read_index
from shardwise.comm import World
from shardwise.errors import CheckpointError, CommError
from shardwise.machine import spare_bytes
from shardwise.optim import AdoptedOptimizer, Piece
from shardwise.placement import Box, Span
from shardwise.storage import DiskRows, agrees, copy_into, may_overlap

STREAMED_NUMEL = 2**20
"""Elements that are in memory at once on their way from a checkpoint to a disk."""


class Stateful(Protocol):
    """A scheduler, a loader: whatever says and takes back what it needs to go on."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> object: ...


@dataclass(frozen=True)
class Loaded:
    """What came back: the step it was saved at and the user's own state."""

    path: Path
    step: int
    state: dict[str, Any]
    num_bytes_read: int = 0
    """By this rank: what it needs, and once more what replaced values for which there was no memory beside the old."""


@dataclass
class _Filling:
    """A tensor that is there, where its elements lie in the checkpoint, and these if they have been read already."""

    entry: Entry
    reads: list[Read]
    ready: torch.Tensor | None = None


@dataclass
class _PieceStates:
    """The states that a piece will have, by key, and of each where it lies in the checkpoint."""

    piece: Piece
    box: Box | None = None
    """Where a model axis cuts the parameter, the part that the piece is of."""
    reads: dict[str, list[Read]] = field(default_factory=dict)
    wholes: dict[str, Read] = field(default_factory=dict)
    ready: dict[str, torch.Tensor] = field(default_factory=dict)
    """Those that are in memory already, checked, but not yet the optimizer's."""


@dataclass
class _Recipe:
    """All that will be read, worked out and checked before anything is changed."""

    tensors: list[_Filling] = field(default_factory=list)
    states: list[_PieceStates] = field(default_factory=list)
    memories: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] | None = None


def find(folder: Path, world: World) -> Path | None:
    """The checkpoint that all ranks will read: rank 0 looks, and tells the others. All ranks call.

    What it cannot look into, or what `newest` refuses, all ranks raise.
    """
    said = {}
    if world.rank == 0:
        try:
            found = newest(folder)
            said = {"path": None if found is None else str(found)}
        except (CheckpointError, OSError) as error:
            is_ours = isinstance(error, CheckpointError)
            said = {"error": str(error) if is_ours else f"{folder} cannot be looked into: {error}."}
    told = json.loads(world.exchange(json.dumps(said).encode(), "index")[0])
    if "error" in told:
        raise CheckpointError(told["error"])
    return None if told["path"] is None else Path(told["path"])


def load(
    path: Path,
    content: Content,
    optimizer: AdoptedOptimizer | None,
    world: World,
    objects: Mapping[str, Stateful] | None = None,
    before_change: Callable[[], None] = lambda: None,
) -> Loaded:
    """Fill `content`, the optimizer, the `objects` and this rank's generators from the checkpoint at `path`.

    All ranks call. Nothing is changed before the index and every byte that is needed have been checked on every rank;
    if one rank refuses, all raise the same `CheckpointError`. `before_change` is called when all have agreed.
    """
    objects, before = objects or {}, dict[str, Any]()
    with _reader(path, world) as reader, _undone_on_refusal(objects, before):
        recipe = _Recipe()
        with _agreed(world):
            check_same_model(path, reader, content, world)
            check_same_groups(path, reader.index, content, optimizer)
            check_same_optimizer(path, reader, content, optimizer)
            _work_out(recipe, reader, content, optimizer)
            _read_and_check(recipe, reader, optimizer, world)
            _recall(recipe, reader, world)
            before |= {name: copy.deepcopy(thing.state_dict()) for name, thing in objects.items()}
            _give_back(path, objects, recipe.memories)
        before_change()
        with _agreed(
            world, "The checkpoint changed while it was read, and the model now has parts of it. Resume again. "
        ):
            _fill(recipe, reader, optimizer)
        if recipe.generators is not None:
            rng.restore(recipe.generators, world.rank_device)
        return Loaded(path, reader.index.step, decode(reader.index.state), reader.num_bytes_read)


# -- refusals ---------------------------------------------------------------------------------------------


@contextmanager
def _reader(path: Path, world: World) -> Iterator[Reader]:
    reader: list[Reader] = []
    with _agreed(world):
        reader.append(Reader(path, read_index(path)))
    with reader[0]:
        yield reader[0]


@contextmanager
def _agreed(world: World, prefix: str = "") -> Iterator[None]:
    """What one rank refuses inside, all refuse on leaving, in the words of the first."""
    refusal = ""
    cause: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others must hear of it
        refusal = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        cause = error
    refusals = [message.decode() for message in world.exchange(refusal.encode(errors="backslashreplace"), "loaded")]
    if any(refusals):
        raise CheckpointError(prefix + next(said for said in refusals if said)) from cause


@contextmanager
def _undone_on_refusal(objects: Mapping[str, Stateful], before: Mapping[str, Any]) -> Iterator[None]:
    """Put the user's objects back to what they said `before` if this ends in a refusal."""
    try:
        yield
    except (CheckpointError, CommError):
        for name, state in before.items():
            objects[name].load_state_dict(state)
        raise


# -- before anything is changed ---------------------------------------------------------------------------


def _work_out(recipe: _Recipe, reader: Reader, content: Content, optimizer: AdoptedOptimizer | None) -> None:
    """Where every element lies that this rank needs."""
    for entry in content.entries:
        if entry.kind.startswith("state."):
            continue
        kind = _kind_there(reader, entry)
        recipe.tensors.append(_Filling(entry, reader.reads(kind, entry.name, entry.span, entry.box)))
    for piece in optimizer.pieces if optimizer is not None and reader.index.groups else ():
        states = _PieceStates(piece, content.boxes.get(piece.name))
        recipe.states.append(states)
        kinds = [kind for kind in reader.kinds_of(piece.name) if kind.startswith("state.")]
        for kind in kinds if piece.span.numel else ():
            key, whole = kind.removeprefix("state."), reader.whole(kind, piece.name)
            if whole is not None:
                states.wholes[key] = whole
            else:
                states.reads[key] = reader.reads(kind, piece.name, piece.span, states.box)


def _kind_there(reader: Reader, entry: Entry) -> str:
    """A rank's own buffer, else rank 0's; formats that are converted from may call a buffer `param`, or the reverse."""
    common = entry.kind.partition(".")[0]
    kinds = (entry.kind, common, "param" if common == "buffer" else "buffer")
    return next((kind for kind in kinds if reader.first_chunk(kind, entry.name)), entry.kind)


def _read_and_check(recipe: _Recipe, reader: Reader, optimizer: AdoptedOptimizer | None, world: World) -> None:
    """Every byte that this rank needs, and of the other files, shared among ranks, that they are there.

    What is read is kept beside the values that it will replace, as far as the host has memory to spare; beyond that it
    is only checked, and read again when all ranks have agreed. States that the optimizer does not have yet take no
    memory that they would not take anyway.
    """
    for number, file in enumerate(reader.index.files):
        if number % world.size == world.rank:
            reader.check_file(file)
    spare = _Spare(spare_bytes(world.local_size or world.size))
    for filling in recipe.tensors:
        entry, reads = filling.entry, filling.reads
        if may_overlap(entry.tensor):
            _check_overlap(reader, entry, reads)
        if entry.rows is None and spare.takes(entry.span.numel * entry.tensor.dtype.itemsize):
            filling.ready = torch.empty(entry.span.numel, dtype=entry.tensor.dtype)
        for read in reads:
            reader.check(read) if filling.ready is None else reader.fill(read, filling.ready)
    for states in recipe.states:
        assert optimizer is not None
        tensor = states.piece.tensor.detach()
        is_on_disk = states.piece.flat.spec.updates_from_disk  # from one file to another, when all have agreed
        has_some = is_on_disk or not optimizer.takes_states_as_they_are or bool(optimizer.state_of(states.piece))
        for key, reads in states.reads.items():
            dtype = _state_dtype(reader, optimizer, states.piece, key)
            if not has_some:
                states.ready[key] = _read_state(reader, torch.empty_like(tensor, dtype=dtype), reads)
            elif not is_on_disk and spare.takes(tensor.numel() * dtype.itemsize):
                states.ready[key] = _read_state(reader, torch.empty_like(tensor, dtype=dtype, device="cpu"), reads)
            else:
                for read in reads:
                    reader.check(read)
        for key, read in states.wholes.items():
            states.ready[key] = reader.tensor(read)


@dataclass
class _Spare:
    """Memory of the host that may be taken until the values are where they belong."""

    num_bytes: int

    def takes(self, num_bytes: int) -> bool:
        if num_bytes > self.num_bytes:
            return False
        self.num_bytes -= num_bytes
        return True


def _check_overlap(reader: Reader, entry: Entry, reads: list[Read]) -> None:
    """Elements that are one number in the model have to be the same in the checkpoint."""
    values = torch.empty(entry.span.numel, dtype=entry.tensor.dtype)
    for read in reads:
        reader.fill(read, values)
    if not agrees(entry.tensor.detach(), values):
        raise CheckpointError(
            f"Elements of {entry.kind} {entry.name} share memory in the model (it is expanded, or a window), but "
            f"{reader.path} has different values for them. Register the buffer as a tensor of its own: x.clone()."
        )


def _recall(recipe: _Recipe, reader: Reader, world: World) -> None:
    """What this rank remembered: generators as far as there was such a rank; objects, in another world, as rank 0's."""
    own = read_document(reader, world.rank)
    if own is not None:
        recipe.generators = own.generators
    chosen = own if reader.index.world_size == world.size else read_document(reader, 0)
    if chosen is not None:
        recipe.memories = chosen.objects


def _give_back(path: Path, objects: Mapping[str, Stateful], memories: Mapping[str, Any]) -> None:
    for name, thing in objects.items():
        if name not in memories:
            raise CheckpointError(
                f"{path} has no state for {name}, which engine.remember() was given. If {name} is new, resume before "
                f"engine.remember({name}=...)."
            )
        try:
            thing.load_state_dict(memories[name])
        except Exception as error:  # it is the user's object, and may raise anything
            raise CheckpointError(
                f"{name}.load_state_dict() refused the state in {path} ({type(error).__name__}: {error})."
            ) from error


# -- the change -------------------------------------------------------------------------------------------


def _fill(recipe: _Recipe, reader: Reader, optimizer: AdoptedOptimizer | None) -> None:
    for filling in recipe.tensors:
        _fill_tensor(filling, reader)
    if optimizer is not None and reader.index.groups:
        _fill_states(recipe, reader, optimizer)
        _fill_groups(reader.index, optimizer)


def _fill_tensor(filling: _Filling, reader: Reader) -> None:
    entry, out, values = filling.entry, filling.entry.tensor.detach(), filling.ready
    filling.ready = None
    if entry.rows is not None:
        _stream(reader, entry.rows, out, filling.reads, entry.span, entry.box)
        return
    if values is None:
        values = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        for read in filling.reads:
            reader.fill(read, values)
        if out.is_contiguous():
            return
    copy_into(out, values)


def _fill_states(recipe: _Recipe, reader: Reader, optimizer: AdoptedOptimizer) -> None:
    """Each piece's states: those that were read before as they are, the others in the memory they have if it fits."""
    groups = {param: group for group in optimizer.groups for param in group["params"]}
    for states in recipe.states:
        piece, group = states.piece, groups[states.piece.param]
        device = piece.tensor.device
        given: dict[str, Any] = {}
        had = optimizer.state_of(piece) if optimizer.takes_states_as_they_are else {}
        for key, reads in states.reads.items():
            dtype, ready = _state_dtype(reader, optimizer, piece, key), states.ready.pop(key, None)
            if piece.flat.rows is not None and piece.flat.spec.updates_from_disk:
                given[key] = piece.flat.rows.place(piece.index, key, piece.tensor.numel(), dtype)
                _stream(reader, piece.flat.rows, given[key], reads, piece.span, states.box)
            elif ready is None:
                given[key] = _read_state(reader, _memory_for(piece, dtype, had.get(key)), reads)
            elif ready.device == device:
                given[key] = ready
            else:
                given[key] = _memory_for(piece, dtype, had.get(key)).copy_(ready)
        for key in states.wholes:
            on_host = key == "step" and not group.get("capturable") and not group.get("fused")  # where torch wants it
            given[key] = states.ready.pop(key).to("cpu" if on_host else device)
        numbers = reader.index.numbers.get(piece.name, {}) if piece.span.numel else {}
        given |= {key: decode(value) for key, value in numbers.items()}
        optimizer.put_state(piece, given)


def _memory_for(piece: Piece, dtype: torch.dtype, had: object) -> torch.Tensor:
    """The memory of the state that the piece `had` if that fits, else new memory."""
    if isinstance(had, torch.Tensor) and (had.shape, had.dtype) == (piece.tensor.shape, dtype):
        return had.detach()
    return torch.empty_like(piece.tensor.detach(), dtype=dtype)


def _stream(reader: Reader, rows: DiskRows, out: torch.Tensor, reads: list[Read], span: Span, box: Box | None) -> None:
    """From the checkpoint's files to where `out` says on a disk, piece by piece."""
    memory = torch.empty(min(span.numel, STREAMED_NUMEL), dtype=out.dtype)
    for start in range(0, span.numel, STREAMED_NUMEL):
        part = Span(span.start + start, min(span.start + start + STREAMED_NUMEL, span.stop))
        values = memory[: part.numel]
        for read in reader.reads(reads[0].chunk.kind, reads[0].chunk.name, part, box):
            reader.fill(read, values)
        rows.write(out[start : start + part.numel], values)


def _read_state(reader: Reader, out: torch.Tensor, reads: list[Read]) -> torch.Tensor:
    for read in reads:
        reader.fill(read, out)
    return out


def _state_dtype(reader: Reader, optimizer: AdoptedOptimizer, piece: Piece, key: str) -> torch.dtype:
    """A state that had its parameter's dtype follows it to another one, as in torch; others keep theirs. A narrow one
    stays so if this optimizer, too, keeps it narrow."""
    state, param = reader.first_chunk(f"state.{key}", piece.name), reader.first_chunk("param", piece.name)
    assert state is not None
    if state.is_narrow and key not in optimizer.narrow_keys_of(piece):
        return piece.tensor.dtype
    if param is None or state.dtype == param.dtype or state.dtype == dtype_name(piece.tensor.dtype):
        return piece.tensor.dtype
    return dtype_of(state.dtype)


def _fill_groups(index: Index, optimizer: AdoptedOptimizer) -> None:
    for group, member, saved in zip(optimizer.groups, optimizer.group_owners, index.groups, strict=True):
        for key, value in settings_of(saved, member).items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
