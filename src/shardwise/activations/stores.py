"""Where saved tensors lie meanwhile: on the host, or nowhere, in a rehearsal that counts them."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch

from shardwise.devices import RankDevice
from shardwise.storage import Copied, Copy, HostMemory
from shardwise.telemetry import ByteMeter

Tensor = torch.Tensor
KIND = "activations"


class Away(Protocol):
    """One storage's bytes, on another tier."""

    def settle(self) -> None:
        """What is computed from here on may overwrite what it was copied from."""
        ...

    def look_ahead(self) -> None:
        """They are asked for soon, but not next."""
        ...

    def fetch(self, out: Tensor) -> Copy:
        """Start to bring them into `out`, a flat tensor on the device."""
        ...

    def release(self) -> None:
        """Nobody asks for them any more. Called by whatever thread lets go last."""
        ...


class Store(Protocol):
    def put(self, source: torch.UntypedStorage, unit: str) -> Away:
        """Start to copy `source`, on the device, saved by `unit`; it may not be written to before `settle`."""
        ...


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """All of it, as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class ActivationMemory(HostMemory):
    """Buffers of the host for what comes in other sizes with every batch: as much is kept for reuse as was once in use.

    Counted as `kind`.
    """

    kind = KIND

    def __init__(self, meter: ByteMeter, device: RankDevice | None = None) -> None:
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
        return self._taken(num_bytes).view(dtype)

    def give_back(self, tensor: Tensor, last: Copy | None = None) -> None:
        self._returned.append((tensor.view(torch.uint8), last or Copied()))  # by autograd's threads too

    def _take_back(self) -> None:
        while self._returned:
            memory, last = self._returned.popleft()
            self._in_use -= memory.nbytes
            super().give_back(memory, last)

    def _make_room(self, num_bytes: int) -> None:
        """Let go of pieces of other sizes rather than hold more than has been in use at once."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._taken_bytes + num_bytes > self._most:
                _, last = self._free[size].pop()
                last.land()
                self._taken_bytes -= size
                self._meter.drop(self.kind, size)


class HostStore:
    """In the host's memory."""

    def __init__(self, memory: ActivationMemory) -> None:
        self.memory = memory

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:  # noqa: ARG002  # memory does not fail by unit
        return _OnHost(self.memory, bytes_of(source, source.device))


class _OnHost:
    def __init__(self, memory: ActivationMemory, source: Tensor) -> None:
        self._memory = memory
        self._bytes = memory.buffer(source.numel(), torch.uint8)
        self._leaving = memory.evict(self._bytes, source)
        self._reading: Copy = Copied()

    def settle(self) -> None:
        self._leaving.wait()

    def look_ahead(self) -> None:
        """The device's turn is next but one."""

    def fetch(self, out: Tensor) -> Copy:
        self.settle()
        self._reading = self._memory.fetch(out.view(torch.uint8), self._bytes)
        return self._reading

    def release(self) -> None:
        self._memory.give_back(self._bytes, self._reading)


class RehearsedStore:
    """Nowhere: bytes are counted as if they were there."""

    def __init__(self) -> None:
        self.num_bytes = self.peak_bytes = 0

    def put(self, source: torch.UntypedStorage, unit: str) -> Away:  # noqa: ARG002  # they are counted as one
        self.num_bytes += source.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return _Rehearsed(self, source.nbytes())


class _Rehearsed:
    def __init__(self, store: RehearsedStore, num_bytes: int) -> None:
        self._store, self._num_bytes = store, num_bytes

    def settle(self) -> None:
        return

    def look_ahead(self) -> None:
        return

    def fetch(self, out: Tensor) -> Copy:  # noqa: ARG002  # it has no bytes
        return Copied()

    def release(self) -> None:
        self._store.num_bytes -= self._num_bytes
