"""Reading elements of a checkpoint: only the bytes that are needed, each checked against its sum.

A damaged checkpoint changes nothing: all that will be replaced is checked before anything is. What is checked is kept
in memory of its own until every rank is content, as far as the host has memory to spare; the rest is read a second time
to fill what is there, from the page cache if the machine has room for it, and checked again, because a file may have
changed. Where dtype and device are the file's own, bytes go to where they belong at once, and are checked there.
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
from shardwise.checkpoint.image import SAFETENSORS_DTYPES
from shardwise.checkpoint.index import INDEX, Chunk, File, Index, box_of
from shardwise.errors import CheckpointError
from shardwise.placement import Box, Run, Span, common_runs
from shardwise.safe_files import as_text, parse_json, regular_descriptor

WORDS = {**SAFETENSORS_DTYPES, torch.complex64: "C64"}
SCRATCH_BYTES = 2**22
"""Read at once, or the largest block if that is more: the memory that reading takes besides what it fills."""


@dataclass(frozen=True)
class Read:
    """Elements `span` of a chunk (counted from its start), which go to `target` and on of the tensor being filled.

    With `runs` not all of them are wanted, nor go to one place: `(start in the span, start in the tensor, number)`.
    """

    chunk: Chunk
    span: Span
    target: int
    runs: tuple[Run, ...] = ()


class Reader:
    """The files of one checkpoint, opened when first needed. Use it in a `with`."""

    def __init__(self, path: Path, index: Index) -> None:
        self.index = index
        self.num_bytes_read = 0
        self.path = path
        self._files = {file.name: file for file in index.files}
        self._handles: dict[str, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._chunks: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
        self._kinds: dict[str, list[str]] = defaultdict(list)
        self._chunks_in: dict[str, list[Chunk]] = defaultdict(list)
        for chunk in index.chunks:
            self._chunks_in[chunk.file].append(chunk)
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

    def reads(self, kind: str, name: str, span: Span, box: Box | None = None) -> list[Read]:
        """Where elements `span` of a tensor, or of its part `box`, lie.

        Raises `CheckpointError` unless every one of them is there once.
        """
        found, missing = [], span.numel
        for chunk in self._chunks.get((kind, name), ()):
            if chunk.shape is not None:
                continue
            if box is not None or chunk.box is not None:
                read = self._read_of_box(chunk, span, box or Box.whole(self.index.shapes[name]))
                found += [read] if read is not None else []
                missing -= sum(numel for _, _, numel in read.runs) if read is not None else 0
                continue
            common = span.overlap(Span(chunk.start, chunk.stop))
            if common.numel:
                found.append(Read(chunk, common.within(Span(chunk.start, chunk.stop)), common.start - span.start))
                missing -= common.numel
        if missing:
            raise CheckpointError(
                f"{self.path} has {span.numel - missing} of {span.numel} elements of {kind} {name} that this rank "
                f"needs; the checkpoint is incomplete."
            )
        return found

    def _read_of_box(self, chunk: Chunk, span: Span, box: Box) -> Read | None:
        """What of a chunk is among elements `span` of the part `box`."""
        theirs = Box.whole(box.shape) if chunk.box is None else box_of(chunk.box, box.shape)
        common = common_runs(theirs, Span(chunk.start, chunk.stop), box, span)
        if not common:
            return None
        first, last = common[0][0], common[-1][0] + common[-1][2]
        runs = tuple((there - first, here - span.start, numel) for there, here, numel in common)
        return Read(chunk, Span(first - chunk.start, last - chunk.start), 0, runs)

    def whole(self, kind: str, name: str) -> Read | None:
        """A tensor that is not made of a parameter's elements; `None` if this is not one."""
        chunk = self.first_chunk(kind, name)
        if chunk is None or chunk.shape is None:
            return None
        return Read(chunk, Span(0, chunk.num_bytes // dtype_of(chunk.dtype).itemsize), 0)

    # -- bytes ------------------------------------------------------------------------------------------

    def check_file(self, file: File) -> None:
        """The file is there, has the size it was written with, and so has its head its sum."""
        self._handle(file.name, "the list of its tensors")

    def file_of(self, read: Read) -> File:
        return self._files[read.chunk.file]

    def check(self, read: Read) -> None:
        """Read what `read` needs and compare its sums; keep nothing."""
        for blocks in self._steps(read):
            self._read(read.chunk, blocks.start, self._scratch(blocks.numel))

    def fill(self, read: Read, out: torch.Tensor) -> None:
        """Put what `read` names into `out`, flat, which may be of another dtype and on another device."""
        if read.runs:
            together = torch.empty(read.span.numel, dtype=dtype_of(read.chunk.dtype))
            self.fill(Read(read.chunk, read.span, 0), together)
            for source, target, numel in read.runs:
                out[target : target + numel].copy_(together[source : source + numel])
            return
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
            scratch = self._scratch(blocks.numel)
            self._read(read.chunk, blocks.start, scratch)
            there = common.within(blocks)
            elements = Span(here.start // dtype.itemsize, here.stop // dtype.itemsize)
            into[elements.start : elements.stop].copy_(scratch[there.start : there.stop].view(dtype))

    def tensor(self, read: Read) -> torch.Tensor:
        """A whole tensor, in its own shape."""
        self._handle(read.chunk.file, f"{read.chunk.kind} {read.chunk.name}")  # before memory is asked for
        out = torch.empty(read.span.numel, dtype=dtype_of(read.chunk.dtype))
        self.fill(read, out)
        return out.reshape(read.chunk.shape or ())

    def _steps(self, read: Read) -> Iterator[Span]:
        """The bytes of the chunk that are read at once, in order: whole blocks, which cover what is wanted."""
        size, wanted = read.chunk.block_bytes, _in_bytes(read)
        at_once = max(SCRATCH_BYTES // size, 1) * size
        for start in range(wanted.start // size * size, wanted.stop, at_once):
            yield Span(start, min(start + at_once, -(-wanted.stop // size) * size, read.chunk.num_bytes))

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.empty(max(SCRATCH_BYTES, num_bytes), dtype=torch.uint8)
        return self._memory[:num_bytes]

    def _read(self, chunk: Chunk, start: int, out: torch.Tensor) -> None:
        """Bytes `start` and on of a chunk into `out`, which begins a block and ends one."""
        path = self.path / chunk.file
        handle = self._handle(chunk.file, f"{chunk.kind} {chunk.name}")
        view = memoryview(out.numpy().data)
        done = 0
        while done < len(view):
            try:
                count = os.preadv(handle, [view[done:]], chunk.offset + start + done)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read at {chunk.kind} {chunk.name}: {error}") from error
            if count == 0:
                raise CheckpointError(f"{path} ends within {chunk.kind} {chunk.name}; it was truncated.")
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
        path = self.path / name
        if name not in self._files:
            raise CheckpointError(f"{self.path} needs {name} for {needed_for}, but its index does not list that file.")
        try:
            handle = regular_descriptor(path, follows_links=False)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is missing, but needed for {needed_for}; the checkpoint is incomplete."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}, needed for {needed_for}, cannot be opened: {error}") from error
        self._handles[name] = handle
        try:
            self._check_head(path, handle, self._files[name])
        except BaseException as error:
            os.close(self._handles.pop(name))
            if isinstance(error, OSError):
                raise CheckpointError(f"{path}, needed for {needed_for}, cannot be read: {error}") from error
            raise
        return handle

    def _check_head(self, path: Path, handle: int, file: File) -> None:
        num_bytes = os.fstat(handle).st_size
        if num_bytes != file.num_bytes:
            raise CheckpointError(
                f"{path} has {num_bytes} bytes instead of {file.num_bytes}, so it was truncated or changed. "
                f"{self._held(file, num_bytes)}"
            )
        head = os.pread(handle, file.head_bytes, 0)
        self.num_bytes_read += len(head)
        if zlib.crc32(head) != file.head_crc32:
            raise CheckpointError(f"{path} is damaged: the checksum of its header does not match.")
        self._compare(path, head, file)

    def _compare(self, path: Path, head: bytes, file: File) -> None:
        """What the file says of its tensors is what the index says."""
        if int.from_bytes(head[:8], "little") != len(head) - 8:
            raise CheckpointError(f"{path} has a header whose length differs from what the index says.")
        said = parse_json(as_text(head[8:], str(path)), f"the head of {path}")
        there = {key: value for key, value in said.items() if key != "__metadata__"} if isinstance(said, dict) else {}
        for chunk in self._chunks_in[file.name]:
            start, dtype = chunk.offset - file.head_bytes, dtype_of(chunk.dtype)
            expected = {
                "dtype": WORDS.get(dtype),
                "shape": [chunk.num_bytes // dtype.itemsize],
                "data_offsets": [start, start + chunk.num_bytes],
            }
            if there.pop(chunk.key, None) != expected:
                raise CheckpointError(
                    f"{path} does not have {chunk.kind} {chunk.name} as {self.path / INDEX} says: "
                    f"{chunk.num_bytes} bytes of {chunk.dtype} from byte {chunk.offset} on."
                )
        if there:
            raise CheckpointError(f"{path} has {next(iter(there))}, which {self.path / INDEX} does not list.")

    def _held(self, file: File, num_bytes: int) -> str:
        """What of the file is lost if only `num_bytes` of it are left."""
        lost = [chunk for chunk in self._chunks_in[file.name] if chunk.offset + chunk.num_bytes > num_bytes]
        lost = [chunk for chunk in lost if chunk.kind != "rank"] or lost
        return f"Lost with it: {lost[0].kind} {lost[0].name} and {len(lost) - 1} more." if lost else ""


def _in_bytes(read: Read) -> Span:
    """What is wanted of the chunk, counted from its start."""
    size = dtype_of(read.chunk.dtype).itemsize
    return Span(read.span.start * size, read.span.stop * size)
