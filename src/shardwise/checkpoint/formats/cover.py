"""Checks that boxes cover a larger one exactly: every element once, and nothing outside."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""
MAX_ODD = 2048
"""The most boxes that are compared in pairs if no cut separates them."""


def why_not_covered(shape: tuple[int, ...], boxes: Sequence[Box]) -> str:
    """Why `boxes` are not the parts of a tensor of `shape`, as half a sentence; empty if they are."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            return f"a piece of it has {len(sizes)} dims instead of {len(shape)}"
        if any(o < 0 or s < 0 or o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a piece of it, {list(sizes)} at {list(offsets)}, lies outside its shape {list(shape)}"
    solid = [box for box in boxes if math.prod(box[1])]
    if (twice := _overlapping(solid)) is not None:
        return f"two pieces of it, at {list(twice[0][0])} and {list(twice[1][0])}, overlap"
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in solid)
    return f"it lacks {missing} of {math.prod(shape)} elements" if missing else ""


def _overlapping(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes with common elements. Groups are cut by planes first, so a grid of boxes takes n log n."""
    waiting = [(boxes, 0)]
    while waiting:
        group, tried = waiting.pop()
        if len(group) < 2:
            continue
        num_dims = len(group[0][0])
        if tried == num_dims:
            if (found := _pair(group)) is not None:
                return found
            continue
        dim = tried
        parts = _split(group, dim)
        if len(parts) > 1:
            waiting += [(part, 0) for part in parts]
        else:
            waiting.append((group, tried + 1))
    return None


def _split(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Groups of boxes separated by planes across `dim`."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda one: one[0][dim]):
        if box[0][dim] >= end or not parts:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box[0][dim] + box[1][dim])
    return parts


def _pair(boxes: list[Box]) -> tuple[Box, Box] | None:
    """As `_overlapping`, for boxes that no plane separates; for too many of them, two that may overlap."""
    for _, same in groupby(sorted(boxes), key=lambda box: box[0]):
        if len(alike := list(same)) > 1:
            return alike[0], alike[1]
    if len(boxes) > MAX_ODD:
        return boxes[0], boxes[1]
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            if all(
                max(o, p) < min(o + s, p + t) for o, s, p, t in zip(one[0], one[1], other[0], other[1], strict=True)
            ):
                return other, one
    return None
