"""A file of fixed size on a disk tier, read and written past the page cache by several threads at once."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch

from shardwise.errors import StateError, TierError
from shardwise.system.checksum import crc32
from shardwise.system.disk.align import PAGE, down, requests
from shardwise.system.disk.calls import SYSTEM, Calls
from shardwise.system.disk.copying import copy_range
from shardwise.system.disk.direct import open_direct, read_at, write_at
from shardwise.system.disk.faults import folder_fault, io_fault
from shardwise.system.disk.io_queue import IoQueue
from shardwise.system.disk.page_buffers import pages
from shardwise.system.disk.pending import Patience, Pending
from shardwise.system.even_parts import round_up
from shardwise.system.units import format_bytes

Life = Literal["process", "job", "left"]


class DiskFile:
    """One process's file of `num_bytes`, rounded up to a page. Its space is allocated when it is created. Call
    `close()`.

    [Note: files without names] The file is unlinked as soon as it is open, so its space is freed however the process
    ends. A process killed between the two steps leaves an empty file, which is found by its name (`TierFolder`). Only
    where others go on from what a lost process had, files keep their names, and those others remove them.

    `read` and `write` take page-aligned buffers and offsets (see `BufferPool`), copy nothing, and return at once. A
    buffer belongs to the file until the `Pending` has been waited for, and two requests for the same bytes may run in
    either order. `get` and `put` take any byte range and wait.
    """

    def __init__(
        self,
        path: Path,
        num_bytes: int,
        queue: IoQueue,
        *,
        checksums: bool = False,
        cut: int = 0,
        life: Life = "process",
        calls: Calls = SYSTEM,
        when_cached: Callable[[], None] = lambda: None,
    ) -> None:
        """With `checksums`, each block that was written as a whole is verified when it is read as a whole. A block
        also ends at byte `cut`, a multiple of a page, so that what is before it can be read alone.

        One for the life of its job keeps its name until `remove`, so that others can read it when this process is gone:
        they open it as one that was "left", and has `num_bytes`.

        `when_cached` is called where direct I/O is refused; its owner must live as long as the file.
        """
        self._when_cached = when_cached
        self.path = path
        self.num_bytes = round_up(num_bytes, PAGE)
        self.queue = queue
        self._calls = calls
        self._sums: dict[int, int] | None = {} if checksums else None
        self._cut = cut if checksums else 0
        self._lock = threading.Lock()
        self._is_named = life == "job"
        try:
            flags = os.O_RDWR if life == "left" else os.O_RDWR | os.O_CREAT | os.O_EXCL
            self._handle, self.is_direct = open_direct(path, flags, calls)
        except OSError as error:
            raise folder_fault(f"{path} cannot be {'opened' if life == 'left' else 'made'}", error) from error
        self._close = weakref.finalize(self, _close, self._handle, queue.patience)
        try:
            if life == "process":
                path.unlink()
            if life != "left":
                calls.reserve(self._handle, self.num_bytes)
        except OSError as error:
            self.close()
            with contextlib.suppress(OSError):
                self.remove()
            raise folder_fault(f"{path} of {format_bytes(self.num_bytes)} cannot be made", error) from error
        if not self.is_direct:
            when_cached()

    def read(self, start: int, into: torch.Tensor) -> Pending:
        """Fill `into`, a flat page-aligned uint8 tensor, with the bytes from `start` on."""
        return self._start(self._read_block, start, into)

    def write(self, start: int, data: torch.Tensor) -> Pending:
        """Write `data`, a flat page-aligned uint8 tensor, from byte `start` on."""
        return self._start(self._write_block, start, data)

    def get(self, start: int, stop: int) -> torch.Tensor:
        """Bytes `start` to `stop`, not necessarily aligned, as a new flat uint8 tensor."""
        first, last = self._around(start, stop)
        memory = pages(last - first)[: last - first]
        self._now(self._read_block, first, memory)
        return memory[start - first : stop - first]

    def put(self, start: int, data: torch.Tensor) -> None:
        """Overwrite the bytes from `start` on with `data`, a flat uint8 tensor; other bytes of the same pages stay."""
        stop = start + data.numel()
        if start == stop:
            return
        first, last = self._around(start, stop)
        memory = pages(last - first)[: last - first]
        for begin, end in sorted({self._around(edge, edge + 1) for edge in (start, stop - 1)}):
            if begin < start or stop < end:
                self._now(self._read_block, begin, memory[begin - first : end - first])
        memory[start - first : stop - first].copy_(data)
        self._now(self._write_block, first, memory)

    def copy_to(self, target: int, at: int, start: int, stop: int) -> bool:
        """Copy bytes `start` to `stop` into another open file, to byte `at`, without passing through memory.

        Returns whether that was possible; otherwise they are copied through memory in pieces. `target` must go through
        the page cache.
        """
        self._check(start, stop)
        reader = os.open(f"/proc/self/fd/{self._handle}", os.O_RDONLY)  # allows any byte range
        try:
            return copy_range(reader, start, target, at, stop - start)
        except (OSError, EOFError) as error:
            raise io_fault("copying", self.path, start, stop, error) from error
        finally:
            os.close(reader)

    def forget_checksums(self) -> None:
        """Do not verify what is in the file now; only what is written from now on."""
        if self._sums is not None:
            self._sums.clear()

    def descriptor(self) -> int:
        """The descriptor of the open file, for advice to the kernel. It is invalid once the file is closed."""
        self._require_open()
        return self._handle

    def remove(self) -> None:
        """Take its name, if it still has one: its space is freed once all who have it open have closed it."""
        if self._is_named:
            self._is_named = False
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which deletes it unless it is named. May be called twice; no request may be under way."""
        self._close()

    def _around(self, start: int, stop: int) -> tuple[int, int]:
        """The whole pages that contain these bytes; whole blocks if each block has a checksum."""
        self._check(start, stop)
        if self._sums is None or start == stop:
            return down(start), round_up(stop, PAGE)
        return self._block_at(start)[0], self._block_at(stop - 1)[1]

    def _block_at(self, byte: int) -> tuple[int, int]:
        """Where the block that contains `byte` begins and ends."""
        first = down(byte, self.queue.block_bytes)
        last = min(first + self.queue.block_bytes, self.num_bytes)
        if first < self._cut < last:
            return (first, self._cut) if byte < self._cut else (self._cut, last)
        return first, last

    def _parts(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Bytes `start` to `stop`, so divided that no part is of two blocks."""
        parts: list[tuple[int, int]] = []
        for first, last in requests(start, stop, self.queue.block_bytes):
            edges = [first, self._cut, last] if first < self._cut < last else [first, last]
            parts += pairwise(edges)
        return parts

    def _now(self, work: Callable[[int, memoryview], None], start: int, buffer: torch.Tensor) -> None:
        """Do it and wait. This thread does a single block itself, if it would wait for ever anyway."""
        if self.queue.patience.seconds is None and len(self._parts(start, start + buffer.numel())) == 1:
            self.queue.do_here(partial(work, start, memoryview(buffer.numpy().data)))
        else:
            self._start(work, start, buffer).wait()

    # -- on the queue's threads --------------------------------------------------------------------------

    def _start(self, work: Callable[[int, memoryview], None], start: int, buffer: torch.Tensor) -> Pending:
        stop = start + buffer.numel()
        self._check(start, stop)
        if start % PAGE or stop % PAGE or (buffer.numel() and buffer.data_ptr() % PAGE):
            raise StateError(
                f"Bytes {start} to {stop} of {self.path.name} and memory at {buffer.data_ptr():#x}: what is read and "
                f"written past the page cache begins and ends on multiples of {PAGE}. Take buffers from a BufferPool."
            )
        view = memoryview(buffer.numpy().data)
        parts = self._parts(start, stop)
        return self.queue.start(partial(work, first, view[first - start : last - start]) for first, last in parts)

    def _read_block(self, start: int, view: memoryview) -> None:
        try:
            was_direct = read_at(self._handle, view, start, self._calls)
        except (OSError, EOFError) as error:
            raise io_fault("reading", self.path, start, start + len(view), error) from error
        self._note(was_direct)
        if self._sums is not None and self._is_block(start, view):
            expected = self._sums.get(start)
            if expected is not None and crc32(view) != expected:
                raise TierError(
                    f"{format_bytes(len(view))} at byte {start} of {self.path} are not what was written there: the "
                    f"checksum differs. Replace the disk or name a folder on another one, and go on from a checkpoint."
                )

    def _write_block(self, start: int, view: memoryview) -> None:
        if self._sums is not None:
            self._sums.pop(self._block_at(start)[0], None)
        try:
            was_direct = write_at(self._handle, view, start, self._calls)
        except OSError as error:
            raise io_fault("writing", self.path, start, start + len(view), error) from error
        self._note(was_direct)
        if self._sums is not None and self._is_block(start, view):
            self._sums[start] = crc32(view)

    def _is_block(self, start: int, view: memoryview) -> bool:
        return self._block_at(start) == (start, start + len(view))

    def _note(self, was_direct: bool) -> None:
        if was_direct or not self.is_direct:
            return
        with self._lock:
            if self.is_direct:
                self.is_direct = False
                self._when_cached()

    def _check(self, start: int, stop: int) -> None:
        self._require_open()
        if not 0 <= start <= stop <= self.num_bytes:
            raise StateError(f"Bytes {start} to {stop} of {self.path.name} were asked for; it has {self.num_bytes}.")

    def _require_open(self) -> None:
        if not self._close.alive:
            raise StateError(f"{self.path.name} is closed.")


def _close(handle: int, patience: Patience) -> None:
    """Close a file, also at the interpreter's exit, unless its disk may not answer that: the kernel closes it then."""
    if not patience.is_over:
        os.close(handle)
