"""Sums over all ranks that differ in their tokens, for what balances experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm import Collectives, Group, sum_small
from shardwise.experts.router import routers_of

Tensor = torch.Tensor


class RankTotal:
    """Adds up a small tensor along one line of ranks after another. All ranks call, and get the same."""

    def __init__(self, collectives: Collectives, groups: Sequence[Group]) -> None:
        self._collectives = collectives
        self._groups = tuple(groups)

    def __deepcopy__(self, memo: object) -> RankTotal:
        """A rehearsal's: as if the others had as many."""
        return RankTotal(self._collectives, ())

    def __call__(self, values: Tensor) -> Tensor:
        """The sum of every rank's `values`, one-dimensional."""
        for group in self._groups:
            values = sum_small(values.contiguous(), self._collectives, group, "experts")
        return values.clone() if not self._groups else values


def share_totals(model: nn.Module, total: RankTotal) -> None:
    """From here on routers of `model` balance over the tokens of all these ranks."""
    for router in routers_of(model).values():
        router.total = total
