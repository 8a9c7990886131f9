"""Parts of whole tensors, described by boxes."""

from __future__ import annotations

import torch

from shardwise.plan.placement import Box, Span

Tensor = torch.Tensor


def part_of(whole: Tensor, box: Box | None) -> Tensor:
    """The elements of `whole`, of the unsplit shape, that are in `box`, in the part's shape. A view where possible."""
    if box is None:
        return whole
    part = whole
    for dim, (size, ranges) in enumerate(zip(box.shape, box.ranges, strict=True)):
        if len(ranges) == 1 and ranges[0].numel == size:
            continue
        cuts = [part.narrow(dim, span.start, span.numel) for span in ranges]
        part = cuts[0] if len(cuts) == 1 else torch.cat(cuts, dim)
    return part


def put_part(whole: Tensor, box: Box, part: Tensor) -> None:
    """Write `part`, the elements of `box` in any shape, to their place in `whole`."""
    shaped = part.reshape(box.own_shape)
    starts = [_starts(ranges) for ranges in box.ranges]
    for block in box.blocks:
        target, source = whole, shaped
        for dim, span in enumerate(block):
            target = target.narrow(dim, span.start, span.numel)
            source = source.narrow(dim, starts[dim][span.start], span.numel)
        target.copy_(source)


def _starts(ranges: tuple[Span, ...]) -> dict[int, int]:
    """For each range, keyed by its start in the whole, its start in the part."""
    found, at = {}, 0
    for span in ranges:
        found[span.start] = at
        at += span.numel
    return found
