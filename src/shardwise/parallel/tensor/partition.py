"""How a dimension is partitioned over the ranks along the tensor-parallel axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardwise.errors import ModelError
from shardwise.parallel.tensor.rules import SplitModule
from shardwise.plan.mesh import TENSOR_AXIS
from shardwise.plan.placement import Span
from shardwise.system.even_parts import even_bounds

AXIS = TENSOR_AXIS


@dataclass(frozen=True)
class Partition:
    """The parts of a dimension of `size`: for each rank its `ranges`, one per fused part. If there are more ranks than
    heads, `copies` neighbours have the same part."""

    size: int
    ranges: tuple[tuple[Span, ...], ...]
    copies: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(span.numel for span in own) for own in self.ranges)


def partition(target: SplitModule, size: int, num_ranks: int) -> Partition:
    """Partition the features of a module as evenly as possible, without splitting a head."""
    if size % target.parts:
        raise ModelError(
            f"{target.path} has {size} features, which are not divisible into {target.parts} matrices of equal size."
        )
    part = size // target.parts
    units = target.heads or part
    if part % units:
        raise ModelError(f"{target.path} has {part} features, which are not divisible into {units} heads.")
    groups = target.groups or units
    copies = 1
    if target.heads is not None and groups >= num_ranks and units % groups == 0:
        own_units = _even(groups, num_ranks, units // groups)
    elif units < num_ranks and target.heads is not None:
        if num_ranks % units:
            raise ModelError(
                f"{target.path} has {units} heads for {num_ranks} ranks along {AXIS}, and neither divides the other. "
                f"Choose a size of {AXIS} that divides {units}, or a multiple of it."
            )
        copies = num_ranks // units
        own_units = [Span(rank // copies, rank // copies + 1) for rank in range(num_ranks)]
    elif target.heads is not None and groups < num_ranks and units % num_ranks:
        raise ModelError(
            f"{target.path} has {units} query heads and {groups} key and value heads for {num_ranks} ranks along "
            f"{AXIS}, which does not divide {units}. Choose a size of {AXIS} that does."
        )
    else:
        if units < num_ranks:
            raise ModelError(
                f"{target.path} has only {units} features for {num_ranks} ranks along {AXIS}. Leave it out of "
                f"tensor.plan."
            )
        own_units = _even(units, num_ranks, 1)
    each = part // units
    ranges = tuple(
        tuple(Span(start + own.start * each, start + own.stop * each) for start in range(0, size, part))
        for own in own_units
    )
    return Partition(size, ranges, copies)


def _even(units: int, num_ranks: int, times: int) -> list[Span]:
    """Each rank's range of `units`. A unit counts `times`."""
    return [Span(start * times, stop * times) for start, stop in itertools.pairwise(even_bounds(units, num_ranks))]
