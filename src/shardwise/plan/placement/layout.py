"""Which elements a rank holds: flat buffers, the parameters in them, and one range per place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement.box import Box
from shardwise.plan.placement.place import Axes
from shardwise.plan.placement.span import Span
from shardwise.system.even_parts import round_up

ALIGN = 16
"""Parameters and shards start at multiples of this many elements: 32 bytes in bf16, a cache line in fp32. Tables whose
parameters are sent in blocks have a multiple of it (`Table.align`)."""


@dataclass(frozen=True)
class Slot:
    """A parameter's position in a flat buffer. Where model axes split or copy it, `shape` is the shape of this rank's
    part, and `box` says which part."""

    name: str
    shape: tuple[int, ...]
    start: int
    box: Box | None = None

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def span(self) -> Span:
        return Span(self.start, self.start + self.numel)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the unsplit parameter."""
        return self.shape if self.box is None else self.box.shape

    @property
    def is_split(self) -> bool:
        """Whether ranks along a model axis have different parts of it."""
        return self.box is not None and self.box.is_split

    @property
    def is_copied(self) -> bool:
        """Whether ranks along a model axis have copies of it."""
        return self.box is not None and self.box.copies > 1


def pack(shapes: Iterable[tuple[str, tuple[int, ...]]], align: int = ALIGN) -> tuple[Slot, ...]:
    """Parameters one after the other in the given order, each at a multiple of `align`."""
    slots, start = [], 0
    for name, shape in shapes:
        slots.append(Slot(name, shape, start))
        start += round_up(math.prod(shape), align)
    return tuple(slots)


def pack_boxes(named: Iterable[tuple[str, Box]], align: int) -> tuple[Slot, ...]:
    """`pack` for parameters of which this rank has only these boxes."""
    every = dict(named)
    slots = pack(((name, box.own_shape) for name, box in every.items()), align)
    return tuple(replace(slot, box=every[slot.name]) for slot in slots)


def padded_numel(slots: Iterable[Slot], num_ranks: int, align: int = ALIGN) -> int:
    """Elements of a buffer that holds `slots` and divides evenly, aligned, among `num_ranks`."""
    return round_up(max((slot.span.stop for slot in slots), default=0), num_ranks * align)


@dataclass(frozen=True)
class Layout:
    """One contiguous range per rank and place, nested in the order of `Table.order`."""

    numel: int
    order: Axes
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, numel: int, order: Axes, mesh: Mesh) -> Layout:
        return cls(numel, order, {axis: mesh.size(axis) for axis in order})

    def span(self, shard: Axes, coordinate: Mapping[str, int]) -> Span:
        """The range that the rank at `coordinate` holds of a tensor sharded over `shard`."""
        start, length = 0, self.numel
        for axis in self.order:
            if axis in shard:
                length //= self.sizes[axis]
                start += length * coordinate[axis]
        return Span(start, start + length)
