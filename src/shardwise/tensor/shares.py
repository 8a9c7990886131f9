"""How a dimension is dealt to the ranks along the tensor-parallel axis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from shardwise.errors import ModelError
from shardwise.placement import Span
from shardwise.tensor.rules import Cut

AXIS = "tp"


@dataclass(frozen=True)
class Shares:
    """How a dimension of `size` is dealt to ranks: `ranges` by place, one per fused part. `copies` neighbours have the
    same, where there are more ranks than what may not be cut in two."""

    size: int
    ranges: tuple[tuple[Span, ...], ...]
    copies: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sum(span.numel for span in own) for own in self.ranges)


def deal(cut: Cut, size: int, num_ranks: int) -> Shares:
    """How the features of a module are dealt: whole heads, as even as can be."""
    if size % cut.parts:
        raise ModelError(f"{cut.path} has {size} features, which are not {cut.parts} matrices of one size.")
    part = size // cut.parts
    units = cut.heads or part
    if part % units:
        raise ModelError(f"{cut.path} has {part} features, which do not make {units} heads.")
    groups = cut.groups or units
    copies = 1
    if cut.heads is not None and groups >= num_ranks and units % groups == 0:
        places = _even(groups, num_ranks, units // groups)
    elif units < num_ranks and cut.heads is not None:
        if num_ranks % units:
            raise ModelError(
                f"{cut.path} has {units} heads for {num_ranks} ranks along {AXIS}, and neither divides the other. "
                f"Choose a size of {AXIS} that divides {units}, or that it divides."
            )
        copies = num_ranks // units
        places = [Span(rank // copies, rank // copies + 1) for rank in range(num_ranks)]
    elif cut.heads is not None and groups < num_ranks and units % num_ranks:
        raise ModelError(
            f"{cut.path} has {units} heads with {groups} of keys and values for {num_ranks} ranks along {AXIS}, which "
            f"does not divide {units}. Choose a size of {AXIS} that does."
        )
    else:
        if units < num_ranks:
            raise ModelError(
                f"{cut.path} has {units} features for {num_ranks} ranks along {AXIS}; leave it out of tensor.plan."
            )
        places = _even(units, num_ranks, 1)
    each = part // units
    ranges = tuple(
        tuple(Span(start + own.start * each, start + own.stop * each) for start in range(0, size, part))
        for own in places
    )
    return Shares(size, ranges, copies)


def _even(units: int, num_ranks: int, times: int) -> list[Span]:
    """`units` dealt to ranks in order, the first ones get one more; each counts for `times`."""
    least, more = divmod(units, num_ranks)
    starts = [rank * least + min(rank, more) for rank in range(num_ranks + 1)]
    return [Span(start * times, stop * times) for start, stop in itertools.pairwise(starts)]
