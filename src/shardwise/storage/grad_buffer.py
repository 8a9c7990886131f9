"""Memory in which gradients wait for the step, where it stays from one step to the next.

[Note: gradient buffers] On a CPU fresh pages cost more than summing gradients into them does. Where parameters stay
whole, so does the memory of their gradients, and sums are made in it. Where parameters come and go it is memory that
is short: there gradients' pages go after the step, and the next forward has them for activations.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.telemetry import ByteMeter

Tensor = torch.Tensor


class Memory(Protocol):
    """Where buffers come from: the collectives, or this process's own memory."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Undefined content; can be sent from where it lies."""
        ...

    def reclaim(self, tensor: Tensor) -> None:
        """Blocks until nobody else reads `tensor`, a buffer that has been sent from."""
        ...


class OwnMemory:
    """This process's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def reclaim(self, tensor: Tensor) -> None:
        """Nobody else can read it."""


class GradBuffer:
    """One flat buffer's. Made when it is first taken."""

    def __init__(self, numel: int, dtype: torch.dtype, meter: ByteMeter) -> None:
        self._numel = numel
        self._dtype = dtype
        self._meter = meter
        self._tensor: Tensor | None = None
        self._memory: Memory | None = None
        """What it is of, which knows who may still read it."""
        self._is_taken = False

    def take(self, memory: Memory) -> Tensor | None:
        """The memory, from `memory` if this is the first time; `None` while something lies in it."""
        if self._is_taken:
            return None
        self._is_taken = True
        if self._tensor is None or self._memory is None:
            self._memory = memory
            self._tensor = memory.buffer(self._numel, self._dtype)
            self._meter.hold("grad", self._tensor.nbytes)
        else:
            self._memory.reclaim(self._tensor)
        return self._tensor

    def leave(self) -> None:
        """Nothing lies in it any more."""
        self._is_taken = False

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        return (numel, dtype) == (self._numel, self._dtype)

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in it."""
        own = self._tensor
        return own is not None and tensor.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
