"""Saved tensors in files: written behind the forward and read ahead of the backward, bypassing the page cache.

A storage is copied into pages of the host and written from there while the next units compute. Once it is written, its
pages are reused; if it is needed earlier, it is taken from the pages. Files are reused as long as sizes stay the same,
and are unlinked when created, so that nothing remains of them however the process ends.

[Note: pages beside a disk] How many pages are in use at once depends on the disk's speed. A rehearsal counts those of a
disk that has written nothing until this rank waits for it: with any other, each storage has pages at no time at which
it has none with that one, so the count is an upper bound.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch

from shardwise.errors import TierError
from shardwise.memory import Copied, Copy, DiskMemory
from shardwise.runtime.activations.stores import SAVED, ActivationMemory, Away, Moved, RehearsedStore, bytes_of
from shardwise.system.devices import RankDevice
from shardwise.system.disk import PAGE, DiskFile, Pending, pages
from shardwise.system.even_parts import round_up
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor
BEHIND_BYTES = 2**28
"""The most bytes that may wait to be written; what one unit has saved may always wait."""
STAGING = "staging"


class PagedMemory(ActivationMemory):
    """Page-aligned buffers, counted as `staging`."""

    kind = STAGING

    def __init__(self, meter: ByteMeter, device: RankDevice | None) -> None:
        super().__init__(meter, device)
        self._device = device

    def _allocate(self, num_bytes: int) -> Tensor:
        return pages(num_bytes, self._device)[:num_bytes]


class Leaving(Protocol):
    """A storage in pages, from which it is to be written."""

    padded: int

    @property
    def has_left(self) -> bool:
        """Whether its write has begun, or is no longer needed."""
        ...

    @property
    def is_written(self) -> bool: ...

    def finish_writing(self) -> None:
        """Wait for the write, and free the pages. Raises `TierError` if it failed."""
        ...


class WriteBehind:
    """What waits to be written, oldest first, within `BEHIND_BYTES`."""

    def __init__(self) -> None:
        self._waiting: deque[Leaving] = deque()
        self._num_bytes = 0

    def make_room(self, num_bytes: int) -> None:
        """Wait for the oldest writes until `num_bytes` more may wait; forget those that are done."""
        while self._waiting and self._waiting[0].has_left:
            if self._num_bytes + num_bytes <= BEHIND_BYTES and not self._waiting[0].is_written:
                return
            oldest = self._waiting.popleft()
            self._num_bytes -= oldest.padded
            oldest.finish_writing()

    def add(self, one: Leaving) -> None:
        self._waiting.append(one)
        self._num_bytes += one.padded


class DiskStore:
    """Stores tensors in files of `disk`'s folder, through pages of `memory`."""

    def __init__(self, disk: DiskMemory, memory: PagedMemory, meter: ByteMeter) -> None:
        self.memory = memory
        self._disk, self._meter = disk, meter.on("disk")
        self.wait_for, self.failure = disk.wait_for, disk.failure
        self._behind = WriteBehind()
        self._free: dict[int, list[DiskFile]] = {}
        self._returned: deque[DiskFile] = deque()
        self._in_use = self._most = self._made_bytes = 0
        self._kept: weakref.WeakSet[_OnDisk] = weakref.WeakSet()
        disk.follow(self)

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:
        padded = _padded(source)
        self._behind.make_room(padded)
        one = _OnDisk(self, bytes_of(source, source.device), padded, unit)
        self._behind.add(one)
        self._kept.add(one)
        return one

    def drop(self) -> None:
        """Drop everything, and delete the files: the step is void. If its backward runs all the same, it gets zeros."""
        for one in list(self._kept):
            one.drop()
        self._kept.clear()
        self._behind = WriteBehind()
        self._take_back()
        self._delete_free(down_to=0)

    # -- files ------------------------------------------------------------------------------------------

    def file(self, num_bytes: int) -> DiskFile:
        """A file of `num_bytes`, whole pages. Raises `TierError` if there is no room, or if the disk was given up."""
        self._disk.patience.require_answers()  # else what was written to it before might still come
        self._take_back()
        self._in_use += num_bytes
        self._most = max(self._most, self._in_use)
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        self._delete_free(down_to=self._most - num_bytes)  # so that no more is held than was in use at once
        file = self._disk.file("activations", num_bytes)
        self._made_bytes += num_bytes
        self._meter.hold(SAVED, num_bytes)
        return file

    def give_back(self, file: DiskFile) -> None:
        """Return a file; autograd's threads call this too."""
        self._returned.append(file)

    def _take_back(self) -> None:
        while self._returned:
            back = self._returned.popleft()
            self._in_use -= back.num_bytes
            self._free.setdefault(back.num_bytes, []).append(back)

    def _delete_free(self, *, down_to: int) -> None:
        """Delete files that are not in use, the largest first, until all have no more than `down_to` bytes."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._made_bytes > down_to:
                self._free[size].pop().close()
                self._made_bytes -= size
                self._meter.drop(SAVED, size)


class _OnDisk:
    def __init__(self, store: DiskStore, source: Tensor, padded: int, unit: str) -> None:
        self._store, self._unit = store, unit
        self._num_bytes, self.padded = source.numel(), padded
        self._pages: Tensor | None = store.memory.buffer(padded, torch.uint8)
        self._leaving: Copy = store.memory.evict(self._pages[: self._num_bytes], source)
        self._last: Copy = Copied()
        """The last copy that reads the pages."""
        self._file: DiskFile | None = None
        self._writing: Pending | None = None
        self._reading: Pending | None = None
        self._is_dropped = False

    def finish_copy(self) -> None:
        if self._file is None and not self._is_dropped:
            assert self._pages is not None
            self._leaving.wait()
            self._leaving.land()
            with self._named_errors("written"):
                self._file = self._store.file(self.padded)
            self._writing = self._file.write(0, self._pages)

    @property
    def has_left(self) -> bool:
        return self._file is not None or self._pages is None

    @property
    def is_written(self) -> bool:
        return self._writing is None or self._writing.is_done

    def finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._named_errors("written"):
                self._store.wait_for(writing)
            self._free_pages()

    def look_ahead(self) -> None:
        if self._pages is None and not self._is_dropped:
            assert self._file is not None
            self._pages = self._store.memory.buffer(self.padded, torch.uint8)
            self._reading = self._file.read(0, self._pages)

    def fetch(self, out: Tensor) -> Copy:
        if self._is_dropped:
            out.zero_()  # not just any numbers: some are indices
            return Copied()
        self.finish_copy()
        self.look_ahead()
        assert self._pages is not None
        reading, self._reading = self._reading, None
        if reading is not None:
            with self._named_errors("read"):
                self._store.wait_for(reading)
        self._last = self._store.memory.fetch(out.view(torch.uint8), self._pages[: self._num_bytes])
        last = self._last
        if self._writing is None:
            self._free_pages()
        return last

    def release(self) -> None:
        for pending in (self._writing, self._reading):
            if pending is not None:
                with contextlib.suppress(TierError):  # the content is no longer needed
                    self._store.wait_for(pending)
        self._writing = self._reading = None
        self._free_pages()
        file, self._file = self._file, None
        if file is not None:
            self._store.give_back(file)

    def drop(self) -> None:
        self._is_dropped = True
        self.release()

    @contextlib.contextmanager
    def _named_errors(self, done: str) -> Iterator[None]:
        """A context that adds the unit's name to errors of the disk."""
        try:
            yield
        except TierError as error:
            told = f"The activations of {self._unit} on a disk could not be {done}. {error}"
            raise self._store.failure(told) from error

    def _free_pages(self) -> None:
        if self._pages is not None:
            self._store.memory.give_back(self._pages, self._last)
            self._pages, self._last = None, Copied()


class RehearsedDiskStore(RehearsedStore):
    """Stores nothing, and counts files, and pages on the host: see [Note: pages beside a disk]."""

    def __init__(self, moved: Moved | None) -> None:
        super().__init__(moved)
        self.behind = WriteBehind()
        self.staging_bytes = self.peak_staging_bytes = 0
        self.unit_bytes = self.peak_unit_bytes = 0
        """Those of one unit, from the end of its forward until its storages have left."""

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:  # noqa: ARG002  # units are counted together
        padded = _padded(source)
        self.behind.make_room(padded)
        self.hold(padded)
        self.moved("evict", padded)
        one = _RehearsedOnDisk(self, padded)
        self.behind.add(one)
        return one

    def stage(self, num_bytes: int) -> None:
        """Count pages that are taken, or given back if `num_bytes` is negative."""
        self.staging_bytes += num_bytes
        self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)

    def leave(self, num_bytes: int) -> None:
        """Count what a unit has saved, or what of it has left if `num_bytes` is negative."""
        self.unit_bytes += num_bytes
        self.peak_unit_bytes = max(self.peak_unit_bytes, self.unit_bytes)

    def begin_peaks(self) -> None:
        super().begin_peaks()
        self.peak_staging_bytes, self.peak_unit_bytes = self.staging_bytes, self.unit_bytes


class _RehearsedOnDisk:
    """As `_OnDisk`, with a disk that writes only what is waited for."""

    def __init__(self, store: RehearsedDiskStore, padded: int) -> None:
        self._store, self.padded = store, padded
        self._has_pages = True
        self.has_left, self.is_written = False, False
        store.stage(padded)
        store.leave(padded)

    def finish_copy(self) -> None:
        if not self.has_left:
            self.has_left = True
            self._store.leave(-self.padded)

    def finish_writing(self) -> None:
        self.is_written = True
        self._free_pages()

    def look_ahead(self) -> None:
        if not self._has_pages:
            self._has_pages = True
            self._store.stage(self.padded)

    def fetch(self, out: Tensor) -> Copy:  # noqa: ARG002  # it has no bytes
        self._store.moved("fetch", self.padded)
        self.finish_copy()
        self.look_ahead()
        if self.is_written:
            self._free_pages()
        return Copied()

    def release(self) -> None:
        self.finish_copy()
        self.is_written = True
        self._free_pages()
        self._store.drop(self.padded)

    def _free_pages(self) -> None:
        if self._has_pages:
            self._store.stage(-self.padded)
            self._has_pages = False


def _padded(source: torch.UntypedStorage) -> int:
    return round_up(source.nbytes(), PAGE)
