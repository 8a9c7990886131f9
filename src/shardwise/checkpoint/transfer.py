"""Bytes of a checkpoint's files on their way to their destination: each is read once and compared with its checksum
there.

[Note: one pass] What can be read directly to its destination is, in whole blocks; the rest of a block of which only a
part is wanted goes to scratch memory in the same call (`preadv`), so nothing is copied. Only other dtypes and devices
need a copy, out of a few MiB. What is only checked goes through memory that stays in the processor's cache. Each file
is read once, in the order of its bytes, and the kernel is told what comes next, because successive reads of a few MiB
leave a fast disk idle. If a rank has more than one core, threads share the work: reading and summing release the
interpreter.

Of 153 ms of processor time for 132 MB from a disk, 57 are the kernel's copy into fresh memory (31 into warm memory, 80
into fresh pages of 4 KiB), 46 zlib's checksums, 11 the copy to their places. Mapping the files would save a copy, but a
file that is truncated meanwhile kills the process.

[Note: known bytes] What has been checked and is read again, to its destination, is summed again only if it may have
changed: if the page cache no longer has all of it, or the file has been written since. The sums are half of the cost of
the second reading. Writes through a mapping of the file need not show in its times, but checkpoints are not written in
that way.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shardwise.checkpoint.index import Chunk
from shardwise.checkpoint.json_codec import dtype_of
from shardwise.errors import CheckpointError
from shardwise.plan.placement import Run, Span
from shardwise.system.checksum import crc32
from shardwise.system.even_parts import round_up

PORTION_BYTES = 2**22
"""Read at once, or the largest block if that is more: the memory that reading takes besides its destination."""
CHECKED_BYTES = 2**18
"""Read at once if only checked: it is summed in the processor's cache."""
AHEAD_BYTES = 2**25
"""How far ahead of reading the kernel is asked to fetch."""
_MOST_TOGETHER = 256
"""Portions per call; the system accepts 1024 buffers, and a portion may need three."""
_ALIGNMENT = 64
SETTLED_SECONDS = 3
"""A file that was last written more than this many seconds ago shows in its times if it is written again. Some file
systems have times in steps of two seconds."""


@dataclass(frozen=True, slots=True)
class Read:
    """Elements `span` of a chunk (counted from its start), to be copied to the tensor being filled, from element
    `target` on.

    With `runs` only some of them are wanted, in several parts: `(start in the span, start in the tensor, number)`.
    """

    chunk: Chunk
    span: Span
    target: int
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of the checkpoint, opened for reading."""

    path: Path
    handle: int
    settled: tuple[int, int] | None
    """Its times, if they would show a later write."""

    @staticmethod
    def of(path: Path, handle: int) -> OpenFile:
        found = os.fstat(handle)
        is_settled = found.st_ctime + SETTLED_SECONDS < time.time()
        return OpenFile(path, handle, (found.st_ctime_ns, found.st_mtime_ns) if is_settled else None)

    def is_unchanged(self) -> bool:
        """Whether it certainly has not been written since it was opened."""
        found = os.fstat(self.handle)
        return self.settled == (found.st_ctime_ns, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class Portion:
    """Bytes `start` to `stop` of a chunk: whole blocks, checked at once.

    They are wanted from byte `start + before` on: `room` takes them as they are; otherwise they are elements for `out`.
    With neither, they are only checked.
    """

    file: OpenFile
    chunk: Chunk
    start: int
    stop: int
    before: int = 0
    room: memoryview | None = None
    out: torch.Tensor | None = None

    @property
    def offset(self) -> int:
        """Its start in the file."""
        return self.chunk.offset + self.start

    @property
    def is_only_checked(self) -> bool:
        return self.room is None and self.out is None

    @property
    def beside_bytes(self) -> int:
        """Bytes that are not read directly to their destination."""
        return self.stop - self.start - (0 if self.room is None else len(self.room))

    def views(self, beside: memoryview) -> list[memoryview]:
        """The destinations of its bytes, in order; `beside` is scratch memory of `beside_bytes`."""
        if self.room is None:
            return [beside]
        return [view for view in (beside[: self.before], self.room, beside[self.before :]) if len(view)]


def portions(read: Read, file: OpenFile, out: torch.Tensor | None) -> Iterator[Portion]:
    """All of `read`, in order, for the flat tensor `out`, or only to be checked."""
    chunk, dtype = read.chunk, dtype_of(read.chunk.dtype)
    itemsize, size = dtype.itemsize, chunk.block_bytes
    first, last = read.span.start * itemsize, read.span.stop * itemsize
    into = None if out is None else out[read.target : read.target + read.span.numel]
    room = None
    if into is not None and into.dtype == dtype and into.device.type == "cpu":
        room = memoryview(into.view(torch.uint8).numpy().data)
    at_once = max(PORTION_BYTES // size, 1) * size
    for start in range(first // size * size, last if read.span.numel else 0, at_once):
        stop = min(start + at_once, round_up(last, size), chunk.num_bytes)
        here, there = max(start, first), min(stop, last)
        if into is None:
            yield Portion(file, chunk, start, stop)
        elif room is not None:
            yield Portion(file, chunk, start, stop, here - start, room[here - first : there - first])
        else:
            elements = into[(here - first) // itemsize : (there - first) // itemsize]
            yield Portion(file, chunk, start, stop, here - start, out=elements)


class Carrier:
    """Reads portions with `num_threads`."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._memory = _Memory()

    def carry(self, wanted: Iterable[Portion], *, are_checked: bool = False) -> int:
        """Read all of them, file by file. Returns how many bytes were read. `are_checked`: all were read before, with
        correct checksums.

        Raises `CheckpointError` naming file and tensor for what cannot be read, or does not match its checksum.
        """
        due = sorted(wanted, key=lambda portion: (portion.file.handle, portion.offset))
        on_host = all(portion.out is None or portion.out.device.type == "cpu" for portion in due)
        stretches = list(_stretches(due))
        carry = partial(self._carry, are_checked=are_checked)
        _each(_announced(stretches), carry, self._num_threads if on_host and len(stretches) > 1 else 1)
        return sum(stretch.stop - stretch.start for stretch in stretches)

    def _carry(self, stretch: _Stretch, *, are_checked: bool) -> None:
        """Read it in one call, then check it; if nothing of it is kept, in small steps."""
        if all(portion.is_only_checked for portion in stretch.portions):
            for portion in stretch.portions:
                _compare(portion, self._passing(portion))
            return
        beside = self._memory.beside(sum(round_up(portion.beside_bytes, _ALIGNMENT) for portion in stretch.portions))
        views, at = [], 0
        for portion in stretch.portions:
            views.append(portion.views(beside[at : at + portion.beside_bytes]))
            at += round_up(portion.beside_bytes, _ALIGNMENT)
        flat = [view for own in views for view in own]
        is_known = are_checked and _read_known(stretch, flat)
        if not is_known:
            _read(stretch, flat)
        for portion, own in zip(stretch.portions, views, strict=True):
            if not is_known:
                _compare(portion, own)
            if portion.out is not None:
                dtype, numel = dtype_of(portion.chunk.dtype), portion.out.numel()
                with torch.no_grad():
                    portion.out.copy_(torch.frombuffer(own[0], dtype=dtype, count=numel, offset=portion.before))

    def _passing(self, portion: Portion) -> Iterator[memoryview]:
        """Its bytes in small steps, in the same memory."""
        num_bytes = portion.stop - portion.start
        memory = self._memory.beside(min(CHECKED_BYTES, num_bytes))
        for start in range(0, num_bytes, CHECKED_BYTES):
            view = memory[: num_bytes - start]
            _read(_Stretch([portion], portion.offset + start, portion.offset + start + len(view)), [view])
            yield view


class _Memory(threading.local):
    """Scratch memory of each thread."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def beside(self, num_bytes: int) -> memoryview:
        if len(self._memory) < num_bytes:
            self._memory = memoryview(
                torch.empty(max(PORTION_BYTES, num_bytes), dtype=torch.uint8, device="cpu").numpy().data
            )
        return self._memory[:num_bytes]


@dataclass(slots=True)
class _Stretch:
    """Portions that are adjacent in a file."""

    portions: list[Portion]
    start: int
    stop: int

    @property
    def file(self) -> OpenFile:
        return self.portions[0].file

    def takes(self, portion: Portion) -> bool:
        """Whether `portion` can be read in the same call."""
        fits = portion.stop - portion.start <= PORTION_BYTES - (self.stop - self.start)
        follows = portion.file is self.file and portion.offset == self.stop
        return fits and follows and len(self.portions) < _MOST_TOGETHER


def _stretches(due: Iterable[Portion]) -> Iterator[_Stretch]:
    """Adjacent portions, joined if they are small: for small tensors the calls are what costs."""
    last: _Stretch | None = None
    for portion in due:
        if last is not None and last.takes(portion):
            last.portions.append(portion)
            last.stop += portion.stop - portion.start
            continue
        if last is not None:
            yield last
        last = _Stretch([portion], portion.offset, portion.offset + portion.stop - portion.start)
    if last is not None:
        yield last


def _announced(stretches: Sequence[_Stretch]) -> Iterator[_Stretch]:
    """Each in turn, with those that follow announced to the kernel."""
    following = iter(stretches)
    done = announced = 0
    for stretch in stretches:
        done += stretch.stop - stretch.start
        while announced < done + AHEAD_BYTES and (ahead := next(following, None)) is not None:
            announced += ahead.stop - ahead.start
            _announce(ahead)
        yield stretch


def _announce(stretch: _Stretch) -> None:
    """Tell the kernel that it will be read soon."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # the file system may not support it
            os.posix_fadvise(stretch.file.handle, stretch.start, stretch.stop - stretch.start, os.POSIX_FADV_WILLNEED)


def _each(stretches: Iterable[_Stretch], work: Callable[[_Stretch], None], num_threads: int) -> None:
    """Run `work` for each, with that many threads. The first error is raised once nothing is running any more."""
    if num_threads == 1:
        for stretch in stretches:
            work(stretch)
        return
    with ThreadPoolExecutor(num_threads, "shardwise reads") as threads:
        under_way: deque[Future[None]] = deque()
        for stretch in stretches:
            under_way.append(threads.submit(work, stretch))
            if len(under_way) > 2 * num_threads:
                under_way.popleft().result()
        for done in under_way:
            done.result()


def _read(stretch: _Stretch, views: list[memoryview]) -> None:
    """Fill the views with the bytes of the stretch, in order."""
    offset = stretch.start
    while offset < stretch.stop:
        try:
            count = os.preadv(stretch.file.handle, views, offset)
        except OSError as error:
            raise CheckpointError(
                f"{stretch.file.path} cannot be read at {_describe(stretch, offset)}: {error}"
            ) from error
        if count == 0:
            raise CheckpointError(f"{stretch.file.path} ends within {_describe(stretch, offset)}; it was truncated.")
        offset += count
        if offset < stretch.stop:
            views = _after(views, count)


def _read_known(stretch: _Stretch, views: list[memoryview]) -> bool:
    """Fill the views like `_read`, if the bytes are certainly those that were read before."""
    if stretch.file.settled is None or not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        count = os.preadv(stretch.file.handle, views, stretch.start, os.RWF_NOWAIT)  # only what needs no disk access
    except OSError:  # nothing of it is cached, or the file system does not support this
        return False
    return count == stretch.stop - stretch.start and stretch.file.is_unchanged()


def _after(views: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    """What remains of the views after the first `num_bytes`."""
    left = []
    for view in views:
        if num_bytes < len(view):
            left.append(view[num_bytes:])
        num_bytes = max(0, num_bytes - len(view))
    return left


def _describe(stretch: _Stretch, offset: int) -> str:
    """The tensor that has byte `offset` of the file."""
    of = next(portion.chunk for portion in reversed(stretch.portions) if portion.offset <= offset)
    return f"{of.kind} {of.name}"


def _compare(portion: Portion, views: Iterable[memoryview]) -> None:
    chunk, size = portion.chunk, portion.chunk.block_bytes
    for number, found in enumerate(_sums(views, size), portion.start // size):
        if number >= len(chunk.crc32) or found != chunk.crc32[number]:
            start = chunk.offset + number * size
            stop = min(start + size, chunk.offset + chunk.num_bytes)
            raise CheckpointError(
                f"{portion.file.path} is damaged in {chunk.kind} {chunk.name}: bytes {start} to {stop} do not have the "
                f"checksum that they were written with."
            )


def _sums(views: Iterable[memoryview], size: int) -> Iterator[int]:
    """The checksum of each `size` bytes of the views' content."""
    found, missing = 0, size
    for view in views:
        at = 0
        while at < len(view):
            part = view[at : at + missing]
            found = crc32(part, found)
            at, missing = at + len(part), missing - len(part)
            if not missing:
                yield found
                found, missing = 0, size
    if missing < size:
        yield found
