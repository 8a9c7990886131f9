"""What a rank needs of a checkpoint: planned, read and checked before anything is changed, then put in its place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.content import Content, Entry
from shardwise.checkpoint.index import FACTOR, ISLAND, LOST, UNSENT, Index, own_kind
from shardwise.checkpoint.json_codec import decode, dtype_name, dtype_of
from shardwise.checkpoint.read import Reader
from shardwise.checkpoint.same import settings_of
from shardwise.checkpoint.transfer import Read
from shardwise.errors import CheckpointError
from shardwise.memory import Flat, Rows, agrees, copy_into, may_overlap
from shardwise.optim import AdoptedOptimizer, Piece
from shardwise.plan.placement import Box, Span
from shardwise.system.disk import tensors_in_pages

Tensor = torch.Tensor
Wanted = list[tuple[Read, Tensor | None]]
"""What will be read together, each with its destination."""
STREAMED_NUMEL = 2**20
"""Elements that are in memory at once when they are copied from a checkpoint to a disk."""


@dataclass
class Filling:
    """An existing tensor, and where its elements lie in the checkpoint."""

    entry: Entry
    reads: list[Read]


@dataclass
class PieceStates:
    """The future states of a piece, by key, and where each lies in the checkpoint."""

    piece: Piece
    box: Box | None = None
    """If a model axis cuts the parameter, the part to which the piece belongs."""
    reads: dict[str, list[Read]] = field(default_factory=dict)
    wholes: dict[str, Read] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """The dtypes in which the optimizer will keep those of `reads`."""
    ready: dict[str, Tensor] = field(default_factory=dict)
    """States that are in memory already, checked, but not yet given to the optimizer."""


@dataclass
class Recipe:
    """Everything that will be read, planned and checked before anything is changed."""

    tensors: list[Filling] = field(default_factory=list)
    states: list[PieceStates] = field(default_factory=list)
    absent: list[Entry] = field(default_factory=list)
    """What the checkpoint need not have: it begins with zeros."""
    memories: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Any] | None = None


# -- before anything is changed ---------------------------------------------------------------------------


def plan(reader: Reader, content: Content, optimizer: AdoptedOptimizer | None) -> Recipe:
    """Find the elements that this rank needs."""
    recipe = Recipe()
    for entry in content.entries:
        own = own_kind(entry.kind)
        if own.startswith("state."):
            continue
        if own == FACTOR or (entry.num_ranks and not _has_residual(reader, entry)):
            factor = reader.whole(entry.kind, entry.name) if own == FACTOR else None
            fits = factor is not None and factor.span.numel == entry.span.numel
            recipe.tensors.append(Filling(entry, [factor] if factor is not None and fits else []))
            continue
        kind = _kind_there(reader, entry)
        if own.startswith(("outer.", f"{LOST}.")) and reader.first_chunk(kind, entry.name) is None:
            recipe.absent.append(entry)  # written without islands, momentum or feedback, or by other ranks
            continue
        recipe.tensors.append(Filling(entry, reader.reads(kind, entry.name, entry.span, entry.box)))
    for piece in optimizer.pieces if optimizer is not None and reader.index.groups else ():
        assert optimizer is not None
        states = PieceStates(piece, content.boxes.get(piece.name))
        recipe.states.append(states)
        kinds = _state_kinds(reader, piece.name, content.island)
        narrow = optimizer.narrow_keys_of(piece)
        for key, kind in kinds.items() if piece.span.numel else ():
            whole = reader.whole(kind, piece.name)
            if whole is not None:
                states.wholes[key] = whole
            else:
                states.reads[key] = reader.reads(kind, piece.name, piece.span, states.box)
                states.dtypes[key] = _state_dtype(reader, piece, kind, is_narrow=key in narrow)
    return recipe


def _own_prefix(island: int | None) -> str:
    return "" if island is None else f"{ISLAND}.{island}."


def _state_kinds(reader: Reader, name: str, island: int | None) -> dict[str, str]:
    """The kinds of a parameter's states by their keys: those of this island, if the checkpoint has any, else the common
    ones."""
    kinds = reader.kinds_of(name)
    for prefix in dict.fromkeys((f"{_own_prefix(island)}state.", "state.")):
        found = {kind.removeprefix(prefix): kind for kind in kinds if kind.startswith(prefix)}
        if found:
            return found
    return {}


def _has_residual(reader: Reader, entry: Entry) -> bool:
    """Whether as many ranks as there are now, of the same island, have written what they had not sent."""
    of_ranks = f"{entry.kind.removesuffix(own_kind(entry.kind))}{UNSENT}."
    num_ranks = sum(kind.startswith(of_ranks) for kind in reader.kinds_of(entry.name))
    return entry.num_ranks == num_ranks and reader.first_chunk(entry.kind, entry.name) is not None


def has_states(reader: Reader, name: str) -> bool:
    """Whether the checkpoint has states of an optimizer for a parameter."""
    return any(kind.startswith("state.") for kind in reader.kinds_of(name))


def _kind_there(reader: Reader, entry: Entry) -> str:
    """A rank's own buffer, or an island's own values, else the common ones. Converted formats may have a buffer as
    `param`, or the reverse."""
    if own_kind(entry.kind).startswith(("outer.", f"{LOST}.")):
        return entry.kind
    first, _, rest = entry.kind.partition(".")
    common = rest.partition(".")[2] if first == ISLAND else first
    kinds = (entry.kind, common, "param" if common == "buffer" else "buffer")
    return next((kind for kind in kinds if reader.first_chunk(kind, entry.name)), entry.kind)


def _state_dtype(reader: Reader, piece: Piece, kind: str, *, is_narrow: bool) -> torch.dtype:
    """As in torch, a state that had its parameter's dtype follows the parameter to another dtype; others keep theirs. A
    narrow state stays narrow if this optimizer keeps it narrow too."""
    state, param = reader.first_chunk(kind, piece.name), reader.first_chunk("param", piece.name)
    assert state is not None
    if state.is_narrow and not is_narrow:
        return piece.tensor.dtype
    if param is None or state.dtype == param.dtype or state.dtype == dtype_name(piece.tensor.dtype):
        return piece.tensor.dtype
    return dtype_of(state.dtype)


def read_and_check(recipe: Recipe, reader: Reader, optimizer: AdoptedOptimizer | None) -> None:
    """Read and check every byte that this rank needs.

    What will replace values is only checked, and read again when all ranks have agreed ([Note: read twice] in
    `read.py`). States that the optimizer does not have yet are kept, because their memory is needed anyway.
    """
    for filling in recipe.tensors:
        if may_overlap(filling.entry.tensor):
            _check_overlap(reader, filling)
    if optimizer is not None:
        of_flats: dict[Flat, list[PieceStates]] = defaultdict(list)
        for states in recipe.states:
            of_flats[states.piece.flat].append(states)
        for flat, own in of_flats.items():
            if not flat.spec.updates_from_disk:  # otherwise they are copied from file to file, when all have agreed
                _make_room_for_new_states(own, optimizer)
    wanted: Wanted = [(read, None) for filling in recipe.tensors for read in filling.reads]
    for states in recipe.states:
        wanted += [(read, states.ready.get(key)) for key, reads in states.reads.items() for read in reads]
        for key, whole in states.wholes.items():
            states.ready[key] = reader.empty(whole)
            wanted.append((whole, states.ready[key]))
    reader.carry(wanted)
    for states in recipe.states:
        for key, whole in states.wholes.items():
            states.ready[key] = states.ready[key].reshape(whole.chunk.shape or ())


def _check_overlap(reader: Reader, filling: Filling) -> None:
    """Elements that share memory in the model must be equal in the checkpoint."""
    entry = filling.entry
    values = torch.empty(entry.span.numel, dtype=entry.tensor.dtype, device="cpu")
    reader.carry((read, values) for read in filling.reads)
    if not agrees(entry.tensor.detach(), values):
        raise CheckpointError(
            f"Elements of {entry.kind} {entry.name} share memory in the model (it is expanded, or a window), but "
            f"{reader.path} has different values for them. Register the buffer as a tensor of its own: x.clone()."
        )


def _make_room_for_new_states(every: list[PieceStates], optimizer: AdoptedOptimizer) -> None:
    """For one flat buffer, whose states are allocated and freed together."""
    new: list[tuple[PieceStates, str]] = []
    for states in every:
        if not optimizer.takes_states_as_they_are or optimizer.state_of(states.piece):
            continue
        if states.piece.tensor.device.type == "cpu":
            new += [(states, key) for key in states.dtypes]
            continue
        for key, dtype in states.dtypes.items():
            states.ready[key] = torch.empty_like(states.piece.flat_state(states.piece.tensor), dtype=dtype)
    room = tensors_in_pages([(states.piece.tensor.numel(), states.dtypes[key]) for states, key in new])
    for (states, key), memory in zip(new, room, strict=True):
        states.ready[key] = memory


# -- the change -------------------------------------------------------------------------------------------


def fill(recipe: Recipe, reader: Reader, optimizer: AdoptedOptimizer | None) -> None:
    """Put everything in its place, once all ranks have agreed."""
    wanted: Wanted = []
    for filling in recipe.tensors:
        wanted += _fill_tensor(filling, reader)
    for entry in recipe.absent:
        entry.tensor.detach().zero_()
    states: list[tuple[Piece, dict[str, Any]]] = []
    if optimizer is not None and reader.index.groups:
        for due, piece, state in _states_to_fill(recipe, reader, optimizer):
            if optimizer.takes_states_as_they_are:
                wanted += due
                states.append((piece, state))
            else:  # it converts states, so read those of one piece at a time
                reader.carry(due, are_checked=True)
                optimizer.put_state(piece, state)
    reader.carry(wanted, are_checked=True)
    if optimizer is not None and reader.index.groups:
        for piece, state in states:
            optimizer.put_state(piece, state)
        optimizer.note_loaded(optimizer.numbered(), lambda _, piece: has_states(reader, piece.name))
        _fill_groups(reader.index, optimizer)


def _fill_tensor(filling: Filling, reader: Reader) -> Wanted:
    """Returns what has still to be read."""
    entry, out = filling.entry, filling.entry.tensor.detach()
    if not filling.reads and (entry.num_ranks or own_kind(entry.kind) == FACTOR):
        out.zero_()  # it begins anew
    if entry.rows is not None:
        _stream(reader, entry.rows, out, filling.reads, entry.span, entry.box)
        return []
    if out.is_contiguous():
        return [(read, out.view(-1)) for read in filling.reads]
    values = torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    reader.carry(((read, values) for read in filling.reads), are_checked=True)
    copy_into(out, values)
    return []


def _states_to_fill(
    recipe: Recipe, reader: Reader, optimizer: AdoptedOptimizer
) -> Iterator[tuple[Wanted, Piece, dict[str, Any]]]:
    """Each piece's states, and what has still to be read of them: states that were read before as they are, others in
    the memory of the existing states if it fits."""
    groups = {param: group for group in optimizer.groups for param in group["params"]}
    for states in recipe.states:
        piece, group = states.piece, groups[states.piece.param]
        device = piece.tensor.device
        wanted: Wanted = []
        given: dict[str, Any] = {}
        had: dict[str, Any] | None = None
        for key, reads in states.reads.items():
            dtype, ready = states.dtypes[key], states.ready.pop(key, None)
            if piece.flat.rows is not None and piece.flat.spec.updates_from_disk:
                given[key] = piece.flat.rows.view(piece.index, key, piece.tensor.numel(), dtype)
                _stream(reader, piece.flat.rows, given[key], reads, piece.span, states.box)
                continue
            if ready is not None and ready.device == device:
                given[key] = ready
                continue
            if had is None:
                had = optimizer.state_of(piece) if optimizer.takes_states_as_they_are else {}
            given[key] = _memory_for(piece, dtype, had.get(key))
            if ready is None:
                wanted += [(read, given[key]) for read in reads]
            else:
                given[key].copy_(ready)
        given = {key: value.view(piece.tensor.shape) for key, value in given.items()}
        for key in states.wholes:
            on_host = key == "step" and not group.get("capturable") and not group.get("fused")  # where torch expects it
            given[key] = states.ready.pop(key).to("cpu" if on_host else device)
        numbers = reader.index.numbers.get(piece.name, {}) if piece.span.numel else {}
        given |= {key: decode(value) for key, value in numbers.items()}
        yield wanted, piece, given


def _memory_for(piece: Piece, dtype: torch.dtype, had: object) -> Tensor:
    """The memory of the piece's existing state `had` if it fits, else new memory."""
    if isinstance(had, Tensor) and (had.shape, had.dtype) == (piece.tensor.shape, dtype):
        return piece.flat_state(had.detach())
    return torch.empty_like(piece.flat_state(piece.tensor.detach()), dtype=dtype)


def _stream(reader: Reader, rows: Rows, out: Tensor, reads: list[Read], span: Span, box: Box | None) -> None:
    """Copy from the checkpoint's files to the place of `out` on a disk, piece by piece."""
    memory = torch.empty(min(span.numel, STREAMED_NUMEL), dtype=out.dtype, device="cpu")
    for start in range(0, span.numel, STREAMED_NUMEL):
        part = Span(span.start + start, min(span.start + start + STREAMED_NUMEL, span.stop))
        values = memory[: part.numel]
        found = reader.reads(reads[0].chunk.kind, reads[0].chunk.name, part, box)
        reader.carry(((read, values) for read in found), are_checked=True)
        rows.write(out[start : start + part.numel], values)


def _fill_groups(index: Index, optimizer: AdoptedOptimizer) -> None:
    for group, member, saved in zip(optimizer.groups, optimizer.group_owners, index.groups, strict=True):
        for key, value in settings_of(saved, member).items():
            group[key] = _as_kept_here(value, group.get(key))


def _as_kept_here(value: Any, own: Any) -> Any:
    """A setting of the checkpoint in the form that it has here, `own`: a tensor stays the same tensor, on its device,
    which compiled updates read, and a number becomes no tensor, which few updates take."""
    if isinstance(own, Tensor) and value is not None:
        own.detach().copy_(torch.as_tensor(value, device="cpu").reshape(own.shape))
        return own
    if isinstance(own, int | float) and isinstance(value, Tensor):
        return value.item()
    if isinstance(own, tuple | list) and isinstance(value, tuple | list):
        return type(value)(map(_as_kept_here, value, own))
    return value
