"""Where saved tensors are kept: on the host, or nowhere, in a rehearsal that only counts them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from shardwise.memory import Copied, Copy, HostMemory
from shardwise.system.devices import RankDevice
from shardwise.system.heap import heap_bytes
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor
Moved = Callable[[str, int], None]
SAVED = "activations"


class Away(Protocol):
    """The bytes of one storage on another tier."""

    def finish_copy(self) -> None:
        """Make the copy safe from later computations that overwrite its source."""
        ...

    def look_ahead(self) -> None:
        """Prefetch: these bytes are needed soon, but not next."""
        ...

    def fetch(self, out: Tensor) -> Copy:
        """Start to copy the bytes into `out`, a flat tensor on the device."""
        ...

    def release(self) -> None:
        """Free the bytes. Called by whichever thread drops the last reference."""
        ...


class Store(Protocol):
    def put(self, source: torch.UntypedStorage, unit: str) -> Away:
        """Start to copy `source`, on the device, saved by `unit`; it must not be written to before `finish_copy`."""
        ...


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """The whole storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class ActivationMemory(HostMemory):
    """Host buffers of sizes that vary with the batch. It keeps as many bytes for reuse as were once in use.

    Counted as `kind`.
    """

    kind = SAVED

    def __init__(self, meter: ByteMeter, device: RankDevice | None) -> None:
        super().__init__(meter, device)
        self._returned: deque[tuple[Tensor, Copy]] = deque()
        self._in_use = self._most = self._taken_bytes = 0

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        num_bytes = numel * dtype.itemsize
        self._take_back()
        self._in_use += num_bytes
        self._most = max(self._most, self._in_use)
        if self._free.get(num_bytes):
            memory, last = self._free[num_bytes].pop()
            last.land()
            return memory.view(dtype)
        self._make_room(num_bytes)
        self._taken_bytes += num_bytes
        self._meter.hold(self.kind, num_bytes)
        return self._allocate(num_bytes).view(dtype)

    def give_back(self, tensor: Tensor, last: Copy | None = None) -> None:
        self._returned.append((tensor.view(torch.uint8), last or Copied()))  # autograd's threads call this too

    def _take_back(self) -> None:
        while self._returned:
            memory, last = self._returned.popleft()
            self._in_use -= memory.nbytes
            super().give_back(memory, last)

    def _make_room(self, num_bytes: int) -> None:
        """Free buffers of other sizes, so that no more is held than was in use at once."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._taken_bytes + num_bytes > self._most:
                _, last = self._free[size].pop()
                last.land()
                self._taken_bytes -= size
                self._meter.drop(self.kind, size)


class HostStore:
    """Stores tensors in the host's memory."""

    def __init__(self, memory: ActivationMemory) -> None:
        self.memory = memory

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:  # noqa: ARG002  # no error depends on the unit
        return _OnHost(self.memory, bytes_of(source, source.device))


class _OnHost:
    def __init__(self, memory: ActivationMemory, source: Tensor) -> None:
        self._memory = memory
        self._bytes = memory.buffer(source.numel(), torch.uint8)
        self._leaving = memory.evict(self._bytes, source)
        self._reading: Copy = Copied()

    def finish_copy(self) -> None:
        self._leaving.wait()

    def look_ahead(self) -> None:
        """Nothing to do, because host memory needs no prefetch."""

    def fetch(self, out: Tensor) -> Copy:
        self.finish_copy()
        self._reading = self._memory.fetch(out.view(torch.uint8), self._bytes)
        return self._reading

    def release(self) -> None:
        self._memory.give_back(self._bytes, self._reading)


class RehearsedStore:
    """Stores nothing, and counts bytes as if it did. `moved` is told of every copy: `evict` or `fetch`, and bytes."""

    def __init__(self, moved: Moved | None) -> None:
        self.num_bytes = self.peak_bytes = 0
        self.heap_bytes = self.peak_heap_bytes = 0
        """Those of them that lie in the heap of the process, on a CPU."""
        self.moved: Moved = moved or _untold

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:  # noqa: ARG002  # units are counted together
        self.hold(source.nbytes())
        self.moved("evict", source.nbytes())
        return _Rehearsed(self, source.nbytes())

    def hold(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        self.heap_bytes += heap_bytes(num_bytes)
        self.peak_heap_bytes = max(self.peak_heap_bytes, self.heap_bytes)

    def drop(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self.heap_bytes -= heap_bytes(num_bytes)

    def begin_peaks(self) -> None:
        """Count peaks from here on."""
        self.peak_bytes, self.peak_heap_bytes = self.num_bytes, self.heap_bytes


class _Rehearsed:
    def __init__(self, store: RehearsedStore, num_bytes: int) -> None:
        self._store, self._num_bytes = store, num_bytes

    def finish_copy(self) -> None:
        return

    def look_ahead(self) -> None:
        return

    def fetch(self, out: Tensor) -> Copy:  # noqa: ARG002  # it has no bytes
        self._store.moved("fetch", self._num_bytes)
        return Copied()

    def release(self) -> None:
        self._store.drop(self._num_bytes)


def _untold(_: str, __: int) -> None:
    """Nobody counts copies."""
