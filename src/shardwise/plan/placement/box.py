"""The part of an unsplit parameter that model axes leave to a rank. It lies below every table.

Ranks along data axes share what one rank has here; the table says how. A *box* is that part. Flat buffers, gradients
and optimizer states are laid out over it as if it were the parameter.

So presets, rules, precisions and optimizers do not know of model axes. The alternative, a DTensor for each parameter,
adds the split to every operation of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.plan.placement.span import Span

Ranges = tuple[Span, ...]
"""Ranges along one dimension, ascending and disjoint."""
Run = tuple[int, int, int]
"""A run of elements that are contiguous in two flattened tensors: its start in either, and its length."""


@dataclass(frozen=True)
class Box:
    """Elements of a tensor of `shape`: those whose index along each dimension lies in one of its `ranges`.

    One range per dimension makes a block; fused projections (qkv, gate and up) have several along one dimension.
    `copies` ranks along the model axes have this same box, and this one is the `place`-th of them. The boxes of all
    ranks that hold the tensor are pairwise equal or disjoint, and together cover it.
    """

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    copies: int = 1
    place: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int], copies: int = 1, place: int = 0) -> Box:
        return cls(tuple(shape), tuple((Span(0, size),) for size in shape), copies, place)

    @classmethod
    def split(cls, shape: Sequence[int], dim: int, ranges: Sequence[Span], copies: int = 1, place: int = 0) -> Box:
        """The part that has `ranges` of dimension `dim`, and all of the others."""
        own: list[Ranges] = [(Span(0, size),) for size in shape]
        own[dim] = tuple(ranges)
        return cls(tuple(shape), tuple(own), copies, place)

    @cached_property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(sum(span.numel for span in ranges) for ranges in self.ranges)

    @cached_property
    def numel(self) -> int:
        """Elements of the part."""
        return math.prod(self.own_shape)

    @cached_property
    def is_split(self) -> bool:
        return self.own_shape != self.shape

    @property
    def has_first(self) -> bool:
        """Whether it contains the first element of the whole tensor."""
        return all(ranges[0].start == 0 for ranges in self.ranges)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The flattened part as runs that are contiguous in the flattened whole, in order: `(start in the part, start
        in the whole, number of elements)`."""
        found: list[Run] = []
        start = 0
        for whole, numel in _runs(self.shape, self.ranges):
            if found and found[-1][1] + found[-1][2] == whole:
                found[-1] = (found[-1][0], found[-1][1], found[-1][2] + numel)
            else:
                found.append((start, whole, numel))
            start += numel
        return tuple(found)

    @cached_property
    def blocks(self) -> tuple[tuple[Span, ...], ...]:
        """The part as blocks, each a range per dimension."""
        blocks: list[tuple[Span, ...]] = [()]
        for ranges in self.ranges:
            blocks = [(*block, span) for block in blocks for span in ranges]
        return tuple(blocks)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, from which `from_json` makes an equal box."""
        ranges = [[[span.start, span.stop] for span in own] for own in self.ranges]
        return {"shape": list(self.shape), "ranges": ranges, "copies": self.copies, "place": self.place}

    @classmethod
    def from_json(cls, numbers: Mapping[str, Any]) -> Box:
        ranges = tuple(tuple(Span(start, stop) for start, stop in own) for own in numbers["ranges"])
        return cls(tuple(numbers["shape"]), ranges, numbers["copies"], numbers["place"])

    def __str__(self) -> str:
        """For example `[0:8+16:24, :]`."""
        parts = (
            ":" if ranges == (Span(0, size),) else "+".join(f"{span.start}:{span.stop}" for span in ranges)
            for size, ranges in zip(self.shape, self.ranges, strict=True)
        )
        return f"[{', '.join(parts)}]"


def _runs(shape: tuple[int, ...], ranges: tuple[Ranges, ...]) -> Iterator[tuple[int, int]]:
    """Start in the flattened whole, and length, of each run."""
    last = max((dim for dim, size in enumerate(shape) if ranges[dim] != (Span(0, size),)), default=-1)
    if last < 0:
        yield 0, math.prod(shape)
        return
    inner = math.prod(shape[last + 1 :])
    starts = [0]
    for dim in range(last):
        stride = math.prod(shape[dim + 1 :])
        starts = [start + index * stride for start in starts for span in ranges[dim] for index in _range(span)]
    for start in starts:
        for span in ranges[last]:
            if span.numel:
                yield start + span.start * inner, span.numel * inner


def _range(span: Span) -> range:
    return range(span.start, span.stop)


def common_runs(one: Box, one_span: Span, other: Box, other_span: Span) -> list[Run]:
    """The elements in both element range `one_span` of the part `one` and element range `other_span` of the part
    `other` of the same tensor, in order: `(start in one, start in other, number of elements)`."""
    first, second = _within(one, one_span), _within(other, other_span)
    found: list[Run] = []
    at, to = 0, 0
    while at < len(first) and to < len(second):
        here, there = first[at], second[to]
        start = max(here[1], there[1])
        stop = min(here[1] + here[2], there[1] + there[2])
        if start < stop:
            found.append((here[0] + start - here[1], there[0] + start - there[1], stop - start))
        if here[1] + here[2] <= there[1] + there[2]:
            at += 1
        else:
            to += 1
    return found


def _within(box: Box, span: Span) -> list[Run]:
    """The runs of the part, clipped to its elements `span`."""
    found = []
    for start, whole, numel in box.runs:
        common = Span(start, start + numel).overlap(span)
        if common.numel:
            found.append((common.start, whole + common.start - start, common.numel))
    return found
