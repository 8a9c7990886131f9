"""Sums over all ranks that have different tokens, for balancing experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm import Collectives, Group, sum_small
from shardwise.parallel.experts.router import Total, routers_of

Tensor = torch.Tensor


class RankTotal:
    """Sums a small tensor along one group of ranks after another. All ranks must call, and get the same result."""

    def __init__(self, collectives: Collectives, groups: Sequence[Group]) -> None:
        self._collectives = collectives
        self._groups = tuple(groups)

    def __deepcopy__(self, memo: object) -> RankTotal:
        """The copy of a rehearsal sums over this rank only."""
        return RankTotal(self._collectives, ())

    def __call__(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, one-dimensional."""
        for group in self._groups:
            values = sum_small(values.contiguous(), self._collectives, group, "experts")
        return values.clone() if not self._groups else values


def share_totals(model: nn.Module, total: Total) -> None:
    """Make the routers of `model` balance over the tokens of all ranks of `total`; of this one, if it is
    `Tensor.clone`."""
    for router in routers_of(model).values():
        router.total = total
