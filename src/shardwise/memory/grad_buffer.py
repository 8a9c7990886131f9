"""Memory in which gradients wait for the step, kept from one step to the next.

[Note: gradient buffers] On a CPU, allocating fresh pages costs more than summing gradients into them. Where parameters
stay whole, so does the memory of their gradients, and sums are made in it. Where parameters come and go, memory is
short: gradients' pages are freed after the step, and the next forward uses them for activations. The same holds where
gradients wait in a narrower dtype than the update reads. Where they wait in a wider dtype than they are sent in, only
so many buffers are kept (`unit_specs`) as gradients in the dtype of messages would fill, which is what DDP keeps: up to
half of them in bf16. The peak is then at the end of the backward, when half of the activations are gone. With all of
them kept it would be at the loss, where no activation is gone yet, and be higher.

In bf16, `ddp` held 1.07 of DDP's memory with all of them kept, and with none took up to 1.04 of its time.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shardwise.system.disk import private_pages
from shardwise.system.heap import HEAP_BLOCK_BYTES, kept_block_bytes
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor


class Memory(Protocol):
    """An allocator of buffers: the collectives, or this process's own memory."""

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A buffer of undefined content that can be sent in place."""
        ...

    def reclaim(self, tensor: Tensor) -> None:
        """Block until no other rank reads `tensor`, a buffer that has been sent from."""
        ...


class OwnMemory:
    """This process's own memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self._device)

    def lasting(self, numel: int, dtype: torch.dtype) -> Tensor:
        """One that outlives the backward in which it is made: see [Note: blocks of a backward] in `system/heap.py`."""
        num_bytes = numel * dtype.itemsize
        if num_bytes < HEAP_BLOCK_BYTES or self._device.type != "cpu" or num_bytes < kept_block_bytes():
            return torch.empty(numel, dtype=dtype, device=self._device)
        return torch.frombuffer(private_pages(num_bytes), dtype=dtype)

    def reclaim(self, tensor: Tensor) -> None:
        """No other rank can read it."""


class GradBuffer:
    """The buffer of one flat buffer's gradients, allocated when it is first taken."""

    def __init__(self, numel: int, dtype: torch.dtype, meter: ByteMeter) -> None:
        self._numel = numel
        self._dtype = dtype
        self._meter = meter
        self._tensor: Tensor | None = None
        self._memory: Memory | None = None
        """The allocator it came from, which knows which ranks may still read it."""
        self._is_taken = False
        self._addresses = range(0)
        """Of its bytes. `has` is asked ten times for each sum."""

    def take(self, memory: Memory) -> Tensor | None:
        """The memory, allocated from `memory` the first time; `None` while it is in use."""
        if self._is_taken:
            return None
        self._is_taken = True
        if self._tensor is None or self._memory is None:
            self._memory = memory
            allocate = memory.lasting if isinstance(memory, OwnMemory) else memory.buffer
            self._tensor = allocate(self._numel, self._dtype)
            first = self._tensor.data_ptr()
            self._addresses = range(first, first + self._tensor.nbytes)
            self._meter.hold("grad", self._tensor.nbytes)
        else:
            self._memory.reclaim(self._tensor)
        return self._tensor

    def leave(self) -> None:
        """It is no longer in use."""
        self._is_taken = False

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        return (numel, dtype) == (self._numel, self._dtype)

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in it."""
        return tensor.data_ptr() in self._addresses
