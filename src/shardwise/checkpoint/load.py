"""Reading a checkpoint: each rank fetches the elements it needs, whatever mesh wrote them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from shardwise.checkpoint import rng
from shardwise.checkpoint.content import Content, Entry
from shardwise.checkpoint.index import LATEST, Chunk, File, Index, read_index
from shardwise.checkpoint.save import checksum
from shardwise.comm import World
from shardwise.errors import CheckpointError
from shardwise.optim import AdoptedOptimizer
from shardwise.placement import Span


@dataclass(frozen=True)
class Loaded:
    """What came back: the step it was saved at and the user's own state."""

    path: Path
    step: int
    state: dict[str, Any]


def newest(folder: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` points at, else the highest step; `None` if there is none.

    A checkpoint itself may be given too.
    """
    if (folder / "index.json").exists():
        return folder
    with contextlib.suppress(OSError):
        pointed = folder / (folder / LATEST).read_text().strip()
        if (pointed / "index.json").exists():
            return pointed
    steps = sorted(path for path in folder.glob("step-*") if (path / "index.json").exists())
    return steps[-1] if steps else None


def load(path: Path, content: Content, optimizer: AdoptedOptimizer | None, world: World) -> Loaded:
    """Fill `content`, the optimizer's states and this rank's generators from the checkpoint at `path`.

    All ranks call. Nothing is changed before index and files have been checked on every rank; if one
    rank refuses, all raise `CheckpointError`.
    """
    reader, refusal = None, ""
    try:
        index = read_index(path)
        _check(path, index, content, world)
        reader = _Reader(path, index)
    except CheckpointError as error:
        refusal = str(error)
    refusals = [message.decode() for message in world.exchange(refusal.encode())]
    if any(refusals) or reader is None:
        raise CheckpointError(next(said for said in refusals if said))
    for entry in content.entries:
        reader.fill(entry)
    if optimizer is not None:
        _restore_optimizer(optimizer, reader)
    if world.rank < len(reader.index.rng):
        rng.restore(reader.index.rng[world.rank])
    return Loaded(path, reader.index.step, reader.index.state)


def _check(path: Path, index: Index, content: Content, world: World) -> None:
    """The same tensors, and files just as they were written. Ranks share the reading of files among them."""
    for name, shape in content.shapes.items():
        if name not in index.shapes:
            raise CheckpointError(f"{path} has no tensor {name}; it is a checkpoint of another model.")
        if tuple(index.shapes[name]) != shape:
            raise CheckpointError(
                f"{path} has {name} with shape {index.shapes[name]}, but the model has {list(shape)}."
            )
    for number, file in enumerate(index.files):
        if number % world.size == world.rank:
            _check_file(path / file.name, file)


def _check_file(path: Path, file: File) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete.")
    if path.stat().st_size != file.num_bytes:
        raise CheckpointError(
            f"{path} has {path.stat().st_size} bytes instead of {file.num_bytes}; it was cut or changed."
        )
    if checksum(path) != file.crc32:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one it was written with.")


class _Reader:
    """Finds and reads the pieces of tensors."""

    def __init__(self, path: Path, index: Index) -> None:
        self.index = index
        self._path = path
        self._chunks: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
        for chunk in index.chunks:
            self._chunks[chunk.kind, chunk.name].append(chunk)

    def kinds_of(self, name: str) -> list[str]:
        return [kind for kind, owner in self._chunks if owner == name]

    def fill(self, entry: Entry) -> None:
        if entry.span.numel or entry.tensor.dim() == 0:
            self._read_into(entry.tensor.detach().view(-1), entry.kind, entry.name, entry.span)

    def piece(self, kind: str, name: str, span: Span, like: torch.Tensor) -> torch.Tensor | None:
        """A state as it must lie for `span` of its parameter; a scalar as it is; `None` if it is not there."""
        chunks = self._chunks[kind, name]
        if not chunks:
            return None
        if chunks[0].stop == 0:
            return self._tensor(chunks[0])
        state = torch.empty_like(like, dtype=self._tensor(chunks[0]).dtype)
        self._read_into(state, kind, name, span)
        return state

    def _read_into(self, out: torch.Tensor, kind: str, name: str, span: Span) -> None:
        missing = span.numel
        for chunk in self._chunks[kind, name]:
            common = span.overlap(Span(chunk.start, chunk.stop))
            if common.numel:
                here, there = common.within(span), common.within(Span(chunk.start, chunk.stop))
                out[here.start : here.stop].copy_(self._slice(chunk, there))
                missing -= common.numel
            elif chunk.stop == 0:
                out.copy_(self._tensor(chunk).view(-1))
        if missing:
            raise CheckpointError(f"{self._path} lacks {missing} elements of {kind} {name}; it is incomplete.")

    def _slice(self, chunk: Chunk, span: Span) -> torch.Tensor:
        """Only the bytes of `span`, where the file keeps the tensor flat; buffers are small and read whole."""
        with _opened(self._path / chunk.file, chunk.key) as file:
            flat = file.get_slice(chunk.key)
            whole: torch.Tensor = (
                flat[span.start : span.stop] if len(flat.get_shape()) == 1 else file.get_tensor(chunk.key)
            )
        return whole if whole.dim() == 1 and whole.numel() == span.numel else whole.view(-1)[span.start : span.stop]

    def _tensor(self, chunk: Chunk) -> torch.Tensor:
        with _opened(self._path / chunk.file, chunk.key) as file:
            tensor: torch.Tensor = file.get_tensor(chunk.key)
            return tensor


@contextlib.contextmanager
def _opened(path: Path, key: str) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read at {key}: {error}") from error


def _restore_optimizer(optimizer: AdoptedOptimizer, reader: _Reader) -> None:
    groups = optimizer.optimizer.param_groups
    if len(groups) != len(reader.index.groups):
        raise CheckpointError(
            f"The checkpoint's optimizer has {len(reader.index.groups)} parameter groups, this one has {len(groups)}."
        )
    for group, saved in zip(groups, reader.index.groups, strict=True):
        group.update({key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()})
    for piece in optimizer.pieces:
        kinds = [kind for kind in reader.kinds_of(piece.name) if kind.startswith("state.")]
        state: dict[str, Any] = {}
        for kind in kinds if piece.span.numel else ():
            value = reader.piece(kind, piece.name, piece.span, piece.tensor.detach())
            if value is not None:
                state[kind.removeprefix("state.")] = value
        optimizer.put_state(piece, state)
