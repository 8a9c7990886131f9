"""What a backward leaves of the gradients of one flat buffer: side by side in one memory, or each where autograd has
made it.

[Note: memory for fresh gradients is used again] Making a view of a small gradient's place takes nearly as long as
filling it: 2.2 and 2.6 us in a step with 16 parameters a unit. So memory whose gradients have been summed keeps its
views, with its storage resized to nothing, until the next backward gives the storage its bytes back. Memory that ranks
share cannot be resized, and is allocated anew.

[Note: gradients that stay] Where nothing moves gradients between a backward and the update, as in a pipeline without
data parallelism or on one rank, they need not lie side by side. On a CPU the first gradient of a parameter stays in the
tensor that autograd has made, as in plain PyTorch, and later ones are added to it. Not on devices: it is not
measured there, and a CUDA graph would write again to the gradients that it has returned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardwise.plan.placement import Slot, Span

Tensor = torch.Tensor
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""One parameter in a flat buffer: shape, strides and start, as `as_strided` takes them. That makes a view in one call;
slicing and then viewing takes two, and twice as long."""


class FreshGradients:
    """Memory as long as a flat buffer, with a view for each parameter's gradient."""

    def __init__(self, memory: Tensor, places: Sequence[Place]) -> None:
        first = memory.storage_offset()
        self.memory = memory
        self.views = [memory.as_strided(shape, strides, first + start) for shape, strides, start in places]
        self._num_bytes = memory.nbytes
        self._chunks: Sequence[Tensor] = ()

    def chunks(self, num_ranks: int) -> Sequence[Tensor]:
        """The part of each of `num_ranks` ranks in a sum."""
        if len(self._chunks) != num_ranks:
            self._chunks = self.memory.chunk(num_ranks)
        return self._chunks

    def zero(self, span: Span) -> None:
        """Let the elements `span`, which no gradient fills, be zero."""
        self.memory[span.as_slice].zero_()

    def allocate(self) -> None:
        """Give the memory its bytes back, undefined."""
        self.memory.untyped_storage().resize_(self._num_bytes)

    def free(self) -> bool:
        """Free the bytes and keep the views. False, and no change, if the memory cannot be resized."""
        storage = self.memory.untyped_storage()
        if not storage.resizable():
            return False
        storage.resize_(0)
        return True


class LooseGradients:
    """A tensor for each parameter of a flat buffer: see [Note: gradients that stay]. `views` has them in the shapes of
    the parameters, contiguous; `None` where no gradient has come."""

    def __init__(self, places: Sequence[Place], numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """`numel` is that of the flat buffer."""
        self.views: list[Tensor | None] = [None] * len(places)
        self.nbytes = numel * dtype.itemsize
        self._places = places
        self._numel, self._dtype, self._device = numel, dtype, device

    def zero(self, span: Span) -> None:
        """Nothing lies there."""

    def made(self, index: int) -> Tensor:
        """A gradient of zeros, from here on, for a parameter that has none."""
        shape, _, _ = self._places[index]
        own = self.views[index] = torch.zeros(shape, dtype=self._dtype, device=self._device)
        return own

    def joined(self) -> Tensor:
        """All in one memory, as long as the flat buffer, with zeros between them. Each is freed once it is copied."""
        joined = torch.zeros(self._numel, dtype=self._dtype, device=self._device)
        for index, (shape, _, start) in enumerate(self._places):
            own, self.views[index] = self.views[index], None
            if own is not None:
                joined[start : start + math.prod(shape)].copy_(own.view(-1))
        return joined


def place(slot: Slot) -> Place:
    """The place of `slot`, with its parameter contiguous."""
    strides = tuple(math.prod(slot.shape[dim + 1 :]) for dim in range(len(slot.shape)))
    return slot.shape, strides, slot.start
