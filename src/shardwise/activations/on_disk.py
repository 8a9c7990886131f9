"""Saved tensors in files: written behind the forward and read ahead of the backward, bypassing the page cache.

A storage is copied into pages of the host and written from there while the next units compute. Once it is written, its
pages are reused; if it is needed earlier, it is taken from the pages. Files are reused as long as sizes stay the same,
and are unlinked when created, so that nothing remains of them however the process ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import torch

from shardwise.activations.stores import KIND, ActivationMemory, Away, bytes_of
from shardwise.devices import RankDevice
from shardwise.errors import TierError
from shardwise.storage import Copied, Copy, DiskMemory
from shardwise.telemetry import ByteMeter
from shardwise.tiers import PAGE, DiskFile, Pending, pages

Tensor = torch.Tensor
BEHIND_BYTES = 2**28
"""The most bytes that may wait to be written; a single storage may always wait."""


class PagedMemory(ActivationMemory):
    """Page-aligned buffers, counted as `staging`."""

    kind = "staging"

    def __init__(self, meter: ByteMeter, device: RankDevice | None = None) -> None:
        super().__init__(meter, device)
        self._device = device

    def _allocate(self, num_bytes: int) -> Tensor:
        return pages(num_bytes, self._device)[:num_bytes]


class DiskStore:
    """Stores tensors in files of `disk`'s folder, through pages of `memory`."""

    def __init__(self, disk: DiskMemory, memory: PagedMemory, meter: ByteMeter) -> None:
        self.memory = memory
        self._disk, self._meter = disk, meter.on("disk")
        self._behind: deque[_OnDisk] = deque()
        self._free: dict[int, list[DiskFile]] = {}
        self._returned: deque[DiskFile] = deque()
        self._in_use = self._most = self._made_bytes = 0

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:
        padded = -(-source.nbytes() // PAGE) * PAGE
        while self._behind and self._behind_bytes() + padded > BEHIND_BYTES:
            self._behind.popleft().finish_writing()
        while self._behind and self._behind[0].is_written:
            self._behind.popleft().finish_writing()
        return _OnDisk(self, bytes_of(source, source.device), padded, unit)

    def note_writing(self, one: _OnDisk) -> None:
        self._behind.append(one)

    def _behind_bytes(self) -> int:
        return sum(one.padded for one in self._behind)

    # -- files ------------------------------------------------------------------------------------------

    def file(self, num_bytes: int) -> DiskFile:
        """A file of `num_bytes`, whole pages. Raises `TierError` if there is no room for one."""
        while self._returned:
            back = self._returned.popleft()
            self._in_use -= back.num_bytes
            self._free.setdefault(back.num_bytes, []).append(back)
        self._in_use += num_bytes
        self._most = max(self._most, self._in_use)
        if self._free.get(num_bytes):
            return self._free[num_bytes].pop()
        for size in sorted(self._free, reverse=True):  # so that no more is held than was in use at once
            while self._free[size] and self._made_bytes + num_bytes > self._most:
                self._free[size].pop().close()
                self._made_bytes -= size
                self._meter.drop(KIND, size)
        file = self._disk.file("activations", num_bytes)
        self._made_bytes += num_bytes
        self._meter.hold(KIND, num_bytes)
        return file

    def give_back(self, file: DiskFile) -> None:
        """Return a file; autograd's threads call this too."""
        self._returned.append(file)


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

    def finish_copy(self) -> None:
        if self._file is None:
            assert self._pages is not None
            self._leaving.wait()
            self._leaving.land()
            with self._named_errors("written"):
                self._file = self._store.file(self.padded)
            self._writing = self._file.write(0, self._pages)
            self._store.note_writing(self)

    @property
    def is_written(self) -> bool:
        return self._writing is None or self._writing.is_done

    def finish_writing(self) -> None:
        """Wait for the write, and free the pages. Raises `TierError` if it failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with self._named_errors("written"):
                writing.wait()
            self._free_pages()

    def look_ahead(self) -> None:
        if self._pages is None:
            assert self._file is not None
            self._pages = self._store.memory.buffer(self.padded, torch.uint8)
            self._reading = self._file.read(0, self._pages)

    def fetch(self, out: Tensor) -> Copy:
        self.finish_copy()
        self.look_ahead()
        assert self._pages is not None
        reading, self._reading = self._reading, None
        if reading is not None:
            with self._named_errors("read"):
                reading.wait()
        self._last = self._store.memory.fetch(out.view(torch.uint8), self._pages[: self._num_bytes])
        last = self._last
        if self._writing is None:
            self._free_pages()
        return last

    def release(self) -> None:
        for pending in (self._writing, self._reading):
            if pending is not None:
                with contextlib.suppress(TierError):  # the content is no longer needed
                    pending.wait()
        self._writing = self._reading = None
        self._free_pages()
        if self._file is not None:
            self._store.give_back(self._file)

    @contextlib.contextmanager
    def _named_errors(self, done: str) -> Iterator[None]:
        """A context that adds the unit's name to errors of the disk."""
        try:
            yield
        except TierError as error:
            raise TierError(f"The activations of {self._unit} on a disk could not be {done}. {error}") from error

    def _free_pages(self) -> None:
        if self._pages is not None:
            self._store.memory.give_back(self._pages, self._last)
            self._pages, self._last = None, Copied()
