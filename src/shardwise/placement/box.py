"""What model axes make of a parameter: which part of the unsplit one a rank has, below every table.

Ranks along data axes share what one rank has here; the table says how. A *box* is the part itself, on which flat
buffers, gradients and optimizer states are laid out as if it were the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwise.placement.span import Span

Ranges = tuple[Span, ...]
"""Of one dimension, ascending and apart."""
Run = tuple[int, int, int]
"""Elements that lie together in two flattened tensors: where they begin in either, and how many they are."""


@dataclass(frozen=True)
class Box:
    """Elements of a tensor of `shape`: those whose index along each dimension lies in one of its `ranges`.

    One range per dimension is a block; fused projections (qkv, gate and up) have several along one dimension. `copies`
    ranks along the model axes have this same box, and this one is the `place`-th of them. All ranks that hold the
    tensor have boxes that are either the same or apart, and together they are all of it.
    """

    shape: tuple[int, ...]
    ranges: tuple[Ranges, ...]
    copies: int = 1
    place: int = 0

    @classmethod
    def whole(cls, shape: Sequence[int], copies: int = 1, place: int = 0) -> Box:
        return cls(tuple(shape), tuple((Span(0, size),) for size in shape), copies, place)

    @classmethod
    def cut(cls, shape: Sequence[int], dim: int, ranges: Sequence[Span], copies: int = 1, place: int = 0) -> Box:
        """The part along dimension `dim` alone."""
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
    def is_cut(self) -> bool:
        return self.own_shape != self.shape

    @property
    def has_first(self) -> bool:
        """Whether the first element of the whole is in it."""
        return all(ranges[0].start == 0 for ranges in self.ranges)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The part, flattened, as runs of elements that lie together in the flattened whole, in order:
        `(start in the part, start in the whole, number of elements)`."""
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
        """The part as blocks: a range per dimension each."""
        blocks: list[tuple[Span, ...]] = [()]
        for ranges in self.ranges:
            blocks = [(*block, span) for block in blocks for span in ranges]
        return tuple(blocks)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, from which `from_json` makes the same."""
        ranges = [[[span.start, span.stop] for span in own] for own in self.ranges]
        return {"shape": list(self.shape), "ranges": ranges, "copies": self.copies, "place": self.place}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Box:
        ranges = tuple(tuple(Span(start, stop) for start, stop in own) for own in said["ranges"])
        return cls(tuple(said["shape"]), ranges, said["copies"], said["place"])

    def __str__(self) -> str:
        """`[0:8+16:24, :]`"""
        said = (
            ":" if ranges == (Span(0, size),) else "+".join(f"{span.start}:{span.stop}" for span in ranges)
            for size, ranges in zip(self.shape, self.ranges, strict=True)
        )
        return f"[{', '.join(said)}]"


def _runs(shape: tuple[int, ...], ranges: tuple[Ranges, ...]) -> Iterator[tuple[int, int]]:
    """Where in the flattened whole each run begins, and how long it is."""
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
    """What is both among elements `one_span` of the part `one` of a tensor and `other_span` of the part `other`, in
    order: `(start in one, start in other, number of elements)`."""
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
    """The runs of the part, as far as they are among its elements `span`."""
    found = []
    for start, whole, numel in box.runs:
        common = Span(start, start + numel).overlap(span)
        if common.numel:
            found.append((common.start, whole + common.start - start, common.numel))
    return found
