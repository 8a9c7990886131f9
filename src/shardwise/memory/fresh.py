"""What a backward leaves of the gradients of one flat buffer: side by side in one memory, or each where autograd has
made it.

[Note: memory for fresh gradients is used again] Making a view of a small gradient's place takes nearly as long as
filling it: 2.2 and 2.6 us in a step with 16 parameters a unit. So memory whose gradients have been summed keeps its
views, with its storage resized to nothing, until the next backward gives the storage its bytes back. Memory that ranks
share cannot be resized, and is allocated anew.

[Note: own chunks] In a sum of which each rank gets a chunk, nobody but a rank itself reads its own summand of its own
chunk. Where ranks read each other's memory, a rank's gradients of that chunk go straight to where the sum is made, and
the others' summands are added there: a pass less over that memory, and of the memory that ranks share, whose pages are
the dearest, a chunk less. A parameter that lies in two chunks has its gradient in two parts.

[Note: gradients that stay] Where nothing moves gradients between a backward and the update, as in a pipeline without
data parallelism or on one rank, they need not lie side by side. On a CPU the first gradient of a parameter stays in the
tensor that autograd has made, as in plain PyTorch, and later ones are added to it. Not on devices: it is not
measured there, and a CUDA graph would write again to the gradients that it has returned.

[Note: sums by autograd] Within a schedule such a gradient is the parameter's `grad`, too: autograd adds those of later
micro-batches to it, as in plain PyTorch, and we only count them. To take each, have Python add it, and leave the
parameter none, 400 times in a step, was the most that a schedule took beyond torch's own. It ends with the schedule,
and where what comes next is to count for another weight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.plan.placement import Slot, Span
from shardwise.system.heap import HEAP_BLOCK_BYTES

Tensor = torch.Tensor
Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""One parameter in a flat buffer: shape, strides and start, as `as_strided` takes them. That makes a view in one call;
slicing and then viewing takes two, and twice as long."""


@dataclass(frozen=True)
class OwnPlaces:
    """Where the parameters of a flat buffer lie if its elements `span` are in memory of their own: see [Note: own
    chunks]."""

    span: Span
    places: Sequence[tuple[bool, Place] | None]
    """Of each parameter, whether it lies there, and where; `None` if it lies in parts."""

    @classmethod
    def of(cls, places: Sequence[Place], span: Span) -> OwnPlaces:
        """Worked out once: of a hundred parameters it made three hundred spans, in each step of two ranks of a host."""
        return cls(span, [_within(span, *each) for each in places])


def _within(own: Span, shape: tuple[int, ...], strides: tuple[int, ...], start: int) -> tuple[bool, Place] | None:
    span = Span(start, start + math.prod(shape))
    common = span.overlap(own)
    if not common.numel:
        return False, (shape, strides, start)
    return (True, (shape, strides, span.within(own).start)) if common == span else None


@dataclass(frozen=True)
class OwnChunk:
    """This rank's elements of a flat buffer, in memory of their own: see [Note: own chunks]."""

    chunk: OwnPlaces
    memory: Tensor

    @property
    def span(self) -> Span:
        return self.chunk.span


class FreshGradients:
    """Memory as long as a flat buffer, with a view for each parameter's gradient.

    With `own` that chunk lies there instead, and `memory` is undefined where it would be. Parameters of which only a
    part lies in it have no view, and are taken in by `parts`.
    """

    def __init__(
        self, memory: Tensor, places: Sequence[Place], own: OwnChunk | None = None, *, is_new: bool = False
    ) -> None:
        """`is_new`: pages of it, and of `own`, may have to be made."""
        first = memory.storage_offset()
        self.memory, self.own = memory, own
        self.views: list[Tensor | None]
        if own is None:
            self.views = [memory.as_strided(shape, strides, first + start) for shape, strides, start in places]
        else:
            memories, starts = (memory, own.memory), (first, own.memory.storage_offset())
            self.views = [
                None if one is None else memories[one[0]].as_strided(one[1][0], one[1][1], starts[one[0]] + one[1][2])
                for one in own.chunk.places
            ]
        self.is_new = is_new and memory.nbytes >= HEAP_BLOCK_BYTES
        """Whether it is worth to make its pages in one call: see [Note: pages in one call] in `system/pages.py`."""
        self._places = places
        self._num_bytes = memory.nbytes
        self._chunks: Sequence[Tensor] = ()

    def parts(self, index: int) -> list[Tensor]:
        """Where the gradient of parameter `index` lies, flat, part by part."""
        shape, _, start = self._places[index]
        return self._parts(Span(start, start + math.prod(shape)))

    def _parts(self, span: Span) -> list[Tensor]:
        common = Span(span.stop, span.stop) if self.own is None else span.overlap(self.own.span)
        parts = [self.memory[span.start : common.start], self.memory[common.stop : span.stop]]
        if self.own is not None:
            parts.insert(1, self.own.memory[common.within(self.own.span).as_slice])
        return [part for part in parts if part.numel()]

    def gradient(self, index: int) -> Tensor:
        """That of parameter `index`, in its shape: a copy if it lies in parts."""
        view = self.views[index]
        return torch.cat(self.parts(index)).view(self._places[index][0]) if view is None else view

    def chunks(self, num_ranks: int) -> Sequence[Tensor]:
        """The part of each of `num_ranks` ranks in a sum."""
        if len(self._chunks) != num_ranks:
            chunks = list(self.memory.chunk(num_ranks))
            if self.own is not None:
                chunks[self.own.span.start // self.own.span.numel] = self.own.memory
            self._chunks = chunks
        return self._chunks

    def zero(self, span: Span) -> None:
        """Let the elements `span`, which no gradient fills, be zero."""
        for part in self._parts(span):
            part.zero_()

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

    is_new = False

    def __init__(self, places: Sequence[Place], numel: int, dtype: torch.dtype, device: torch.device) -> None:
        """`numel` is that of the flat buffer."""
        self.views: list[Tensor | None] = [None] * len(places)
        self.nbytes = numel * dtype.itemsize
        self._places = places
        self._numel, self._dtype, self._device = numel, dtype, device

    def zero(self, span: Span) -> None:
        """Nothing lies there."""

    def gradient(self, index: int) -> Tensor | None:
        """That of parameter `index`, if one has come."""
        return self.views[index]

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
