"""Reading elements of a checkpoint: only the bytes that are needed, each checked against its sum.

Memory that nobody has used yet is filled as it is checked. What is there already is gone over twice: first all of it
is checked, then, when every rank is content, it is filled. So a damaged checkpoint changes nothing, and no second copy
of a shard is ever held. The second time the bytes come from the page cache if the machine has room for them; they are
checked again, because a file may have changed. Where dtype and device are the file's own, bytes go to where they
belong at once, and are checked there.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardwise.checkpoint.codec import dtype_of
from shardwise.checkpoint.index import Chunk, File, Index
from shardwise.errors import CheckpointError
from shardwise.placement import Span

SCRATCH_BYTES = 2**22
"""Read at once, or the largest block if that is more: the memory that reading takes besides what it fills."""


@dataclass(frozen=True)
class Read:
    """Elements `span` of a chunk (counted from its start), which go to `target` and on of the tensor being filled."""

    chunk: Chunk
    span: Span
    target: int


class Reader:
    """The files of one checkpoint, opened when first needed. Use it in a `with`."""

    def __init__(self, path: Path, index: Index) -> None:
        self.index = index
        self.num_bytes_read = 0
        self._path = path
        self._files = {file.name: file for file in index.files}
        self._handles: dict[str, int] = {}
        largest = max((chunk.block_bytes for chunk in index.chunks), default=0)
        self._scratch = torch.empty(max(SCRATCH_BYTES, largest), dtype=torch.uint8)
        self._chunks: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
        self._kinds: dict[str, list[str]] = defaultdict(list)
        for chunk in index.chunks:
            if (chunk.kind, chunk.name) not in self._chunks:
                self._kinds[chunk.name].append(chunk.kind)
            self._chunks[chunk.kind, chunk.name].append(chunk)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    # -- what there is ----------------------------------------------------------------------------------

    def kinds_of(self, name: str) -> list[str]:
        return self._kinds.get(name, [])

    def first_chunk(self, kind: str, name: str) -> Chunk | None:
        chunks = self._chunks.get((kind, name))
        return chunks[0] if chunks else None

    def reads(self, kind: str, name: str, span: Span) -> list[Read]:
        """Where elements `span` of a tensor lie. Raises `CheckpointError` unless every one of them is there once."""
        found, missing = [], span.numel
        for chunk in self._chunks.get((kind, name), ()):
            if chunk.shape is not None:
                continue
            common = span.overlap(Span(chunk.start, chunk.stop))
            if common.numel:
                found.append(Read(chunk, common.within(Span(chunk.start, chunk.stop)), common.start - span.start))
                missing -= common.numel
        if missing:
            raise CheckpointError(
                f"{self._path} has {span.numel - missing} of {span.numel} elements of {kind} {name} that this rank "
                f"needs; it is incomplete."
            )
        return found

    def whole(self, kind: str, name: str) -> Read | None:
        """A tensor that is not made of a parameter's elements; `None` if this is not one."""
        chunk = self.first_chunk(kind, name)
        if chunk is None or chunk.shape is None:
            return None
        return Read(chunk, Span(0, chunk.num_bytes // dtype_of(chunk.dtype).itemsize), 0)

    # -- bytes ------------------------------------------------------------------------------------------

    def check_file(self, file: File) -> None:
        """The file is there, has the size it was written with, and so has its head its sum."""
        self._handle(file.name, "its head")

    def check(self, read: Read) -> None:
        """Read what `read` needs and compare its sums; keep nothing."""
        for blocks in self._steps(read):
            self._read(read.chunk, blocks.start, self._scratch[: blocks.numel])

    def fill(self, read: Read, out: torch.Tensor) -> None:
        """Put what `read` names into `out`, flat, which may be of another dtype and on another device."""
        into = out[read.target : read.target + read.span.numel]
        dtype = dtype_of(read.chunk.dtype)
        raw = into.view(torch.uint8) if (into.dtype, into.device.type) == (dtype, "cpu") else None
        wanted = _in_bytes(read)
        for blocks in self._steps(read):
            common = wanted.overlap(blocks)
            here = common.within(wanted)
            if raw is not None and common == blocks:
                self._read(read.chunk, blocks.start, raw[here.start : here.stop])
                continue
            self._read(read.chunk, blocks.start, self._scratch[: blocks.numel])
            there = common.within(blocks)
            elements = Span(here.start // dtype.itemsize, here.stop // dtype.itemsize)
            into[elements.start : elements.stop].copy_(self._scratch[there.start : there.stop].view(dtype))

    def tensor(self, read: Read) -> torch.Tensor:
        """A whole tensor, in its own shape."""
        out = torch.empty(read.span.numel, dtype=dtype_of(read.chunk.dtype))
        self.fill(read, out)
        return out.reshape(read.chunk.shape or ())

    def _steps(self, read: Read) -> Iterator[Span]:
        """The bytes of the chunk that are read at once, in order: whole blocks, which cover what is wanted."""
        size, wanted = read.chunk.block_bytes, _in_bytes(read)
        at_once = len(self._scratch) // size * size
        for start in range(wanted.start // size * size, wanted.stop, at_once):
            yield Span(start, min(start + at_once, -(-wanted.stop // size) * size, read.chunk.num_bytes))

    def _read(self, chunk: Chunk, start: int, out: torch.Tensor) -> None:
        """Bytes `start` and on of a chunk into `out`, which begins a block and ends one."""
        path = self._path / chunk.file
        handle = self._handle(chunk.file, f"{chunk.kind} {chunk.name}")
        view = memoryview(out.numpy().data)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(handle, [view[done:]], chunk.offset + start + done)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read at {chunk.kind} {chunk.name}: {error}") from error
            if count == 0:
                raise CheckpointError(f"{path} ends in {chunk.kind} {chunk.name}; it was cut.")
            done += count
        self.num_bytes_read += len(view)
        size = chunk.block_bytes
        for at in range(0, len(view), size):
            number = (start + at) // size
            if number >= len(chunk.crc32) or zlib.crc32(view[at : at + size]) != chunk.crc32[number]:
                raise CheckpointError(
                    f"{path} is damaged in {chunk.kind} {chunk.name}: bytes {chunk.offset + start + at} to "
                    f"{chunk.offset + start + min(at + size, len(view))} do not have the checksum that they were "
                    f"written with."
                )

    def _handle(self, name: str, needed_for: str) -> int:
        if name in self._handles:
            return self._handles[name]
        path = self._path / name
        if name not in self._files:
            raise CheckpointError(f"{self._path} needs {name} for {needed_for}, but its index does not list that file.")
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing, which has {needed_for}; the checkpoint is incomplete."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}, which has {needed_for}, cannot be opened: {error}") from error
        self._handles[name] = handle
        self._check_head(path, handle, self._files[name])
        return handle

    def _check_head(self, path: Path, handle: int, file: File) -> None:
        num_bytes = os.fstat(handle).st_size
        if num_bytes != file.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes instead of {file.num_bytes}, so it was cut or changed. "
                f"{self._held(file, num_bytes)}"
            )
        head = os.pread(handle, file.head_bytes, 0)
        self.num_bytes_read += len(head)
        if zlib.crc32(head) != file.head_crc32:
            raise CheckpointError(f"{path} is damaged: its head does not have the checksum that it was written with.")

    def _held(self, file: File, num_bytes: int) -> str:
        """What of the file is lost if only `num_bytes` of it are left."""
        lost = [
            chunk
            for chunk in self.index.chunks
            if chunk.file == file.name and chunk.offset + chunk.num_bytes > num_bytes
        ]
        lost = [chunk for chunk in lost if chunk.kind != "rank"] or lost
        return f"Lost with it: {lost[0].kind} {lost[0].name} and {len(lost) - 1} more." if lost else ""


def _in_bytes(read: Read) -> Span:
    """What is wanted of the chunk, counted from its start."""
    size = dtype_of(read.chunk.dtype).itemsize
    return Span(read.span.start * size, read.span.stop * size)
