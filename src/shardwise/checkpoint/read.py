"""Reading elements of a checkpoint: only the bytes that are needed, each checked against its sum.

A damaged checkpoint changes nothing: everything that will be replaced is checked before any of it is. Values that
replace others are read a second time, to their destination, once every rank has agreed: from the page cache if the host
has memory for it, and checked again if the file may have changed. `transfer.py` moves the bytes.

[Note: read twice] Keeping what was read beside the old values would save the second read, but take fresh memory, which
may cost more. Checking 128 MiB through memory that stays in the processor's cache takes 59 ms, 17 of them to read it
from the page cache, and reading it to its destination 37 more. Reading it into fresh memory takes 57 ms in large pages,
up to 170 on a virtual machine whose host has to find these first, and then 45 for the sums, 26 for the copy to its
destination, and the memory of a second shard. The page cache uses free memory, and gives it up on demand. If it cannot
hold what a host's ranks read, the disk is read twice.

From a cold cache, with fresh memory, a load took 577 ms where DCP took 387; read twice, 353 where it took 333.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch

from shardwise.checkpoint.index import INDEX, Chunk, File, Index, box_of
from shardwise.checkpoint.json_codec import dtype_of
from shardwise.checkpoint.transfer import Carrier, OpenFile, Portion, Read, portions
from shardwise.errors import CheckpointError
from shardwise.init.safetensors_headers import NAMES
from shardwise.plan.placement import Box, Span, common_runs
from shardwise.system.safe_files import as_text, parse_json, regular_descriptor


class Reader:
    """The files of one checkpoint, opened when first needed. Use it in a `with`."""

    def __init__(self, path: Path, index: Index, num_threads: int = 1) -> None:
        """Read with `num_threads`, if there is enough to read."""
        self.index = index
        self.num_bytes_read = 0
        self.path = path
        self._files = {file.name: file for file in index.files}
        self._opened: dict[str, OpenFile] = {}
        self._carrier = Carrier(num_threads)
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
        for file in self._opened.values():
            os.close(file.handle)
        self._opened.clear()

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
        """The part of a chunk that is among elements `span` of the part `box`."""
        theirs = Box.whole(box.shape) if chunk.box is None else box_of(chunk.box, box.shape)
        common = common_runs(theirs, Span(chunk.start, chunk.stop), box, span)
        if not common:
            return None
        first, last = common[0][0], common[-1][0] + common[-1][2]
        runs = tuple((there - first, here - span.start, numel) for there, here, numel in common)
        return Read(chunk, Span(first - chunk.start, last - chunk.start), 0, runs)

    def whole(self, kind: str, name: str) -> Read | None:
        """A separate tensor that is not made of a parameter's elements; `None` if it is not one."""
        chunk = self.first_chunk(kind, name)
        if chunk is None or chunk.shape is None:
            return None
        return Read(chunk, Span(0, chunk.num_bytes // dtype_of(chunk.dtype).itemsize), 0)

    # -- bytes ------------------------------------------------------------------------------------------

    def check_file(self, file: File) -> None:
        """Check that the file exists with its size, and that its header has its checksum and content."""
        self._handle(file.name, "the list of its tensors")

    def file_of(self, read: Read) -> File:
        return self._files[read.chunk.file]

    def check(self, read: Read) -> None:
        """Read what `read` needs and compare its checksums; keep nothing."""
        self.carry([(read, None)])

    def fill(self, read: Read, out: torch.Tensor) -> None:
        """Copy what `read` names into `out`, flat, of any dtype and on any device."""
        self.carry([(read, out)])

    def carry(self, wanted: Iterable[tuple[Read, torch.Tensor | None]], *, are_checked: bool = False) -> None:
        """Fill each tensor with what its `Read` names, like `fill`, or only check that if there is no tensor.

        The order of reading is that of the files. `are_checked`: all of it was read before, by this reader
        ([Note: known bytes] in `transfer.py`).
        """
        due: list[Portion] = []
        for read, out in wanted:
            if read.runs and out is not None:
                self._fill_runs(read, out, are_checked=are_checked)
            elif read.span.numel:
                due += portions(read, self._open(read), out)
        self.num_bytes_read += self._carrier.carry(due, are_checked=are_checked)

    def _fill_runs(self, read: Read, out: torch.Tensor, *, are_checked: bool) -> None:
        together = torch.empty(read.span.numel, dtype=dtype_of(read.chunk.dtype), device="cpu")
        self.carry([(Read(read.chunk, read.span, 0), together)], are_checked=are_checked)
        for source, target, numel in read.runs:
            out[target : target + numel].copy_(together[source : source + numel])

    def empty(self, read: Read) -> torch.Tensor:
        """Memory for a separate tensor, flat."""
        self._open(read)  # raises before memory is allocated
        return torch.empty(read.span.numel, dtype=dtype_of(read.chunk.dtype), device="cpu")

    def tensor(self, read: Read) -> torch.Tensor:
        """A separate tensor, in its own shape."""
        out = self.empty(read)
        self.fill(read, out)
        return out.reshape(read.chunk.shape or ())

    def _open(self, read: Read) -> OpenFile:
        found = self._opened.get(read.chunk.file)
        return found or self._handle(read.chunk.file, f"{read.chunk.kind} {read.chunk.name}")

    def _handle(self, name: str, needed_for: str) -> OpenFile:
        if name in self._opened:
            return self._opened[name]
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
        try:
            self._check_head(path, handle, self._files[name])
        except BaseException as error:
            os.close(handle)
            if isinstance(error, OSError):
                raise CheckpointError(f"{path}, needed for {needed_for}, cannot be read: {error}") from error
            raise
        self._opened[name] = OpenFile.of(path, handle)
        return self._opened[name]

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
        """Raise unless the header lists the same tensors as the index."""
        if int.from_bytes(head[:8], "little") != len(head) - 8:
            raise CheckpointError(f"{path} has a header whose length differs from what the index says.")
        header = parse_json(as_text(head[8:], str(path)), f"the head of {path}")
        there = (
            {key: value for key, value in header.items() if key != "__metadata__"} if isinstance(header, dict) else {}
        )
        for chunk in self._chunks_in[file.name]:
            start, dtype = chunk.offset - file.head_bytes, dtype_of(chunk.dtype)
            expected = {
                "dtype": NAMES.get(dtype),
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
        """What is lost of the file if only `num_bytes` of it are left."""
        lost = [chunk for chunk in self._chunks_in[file.name] if chunk.offset + chunk.num_bytes > num_bytes]
        lost = [chunk for chunk in lost if chunk.kind != "rank"] or lost
        return f"Lost with it: {lost[0].kind} {lost[0].name} and {len(lost) - 1} more." if lost else ""
