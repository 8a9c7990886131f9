"""Sums over all ranks that have different tokens, for balancing experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.parallel.experts.router import Total, routers_of

Tensor = torch.Tensor


class RankTotal:
    """Sums a small tensor along one line of ranks after another. All ranks must call, and get the same result."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = tuple(lines)

    def __deepcopy__(self, memo: object) -> RankTotal:
        """The copy of a rehearsal sums over this rank only."""
        return RankTotal(())

    def __call__(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, one-dimensional; this rank's own where nothing is sent."""
        lines = [line for line in self.lines if not line.is_silent]
        for line in lines:
            values = line.sum(values)
        return values if lines else values.clone()


def share_totals(model: nn.Module, total: Total) -> None:
    """Make the routers of `model` balance over the tokens of all ranks of `total`; of this one, if it is
    `Tensor.clone`."""
    for router in routers_of(model).values():
        router.total = total


def lines_of_totals(model: nn.Module) -> list[Line]:
    """Along which the routers of `model` send."""
    totals = dict.fromkeys(router.total for router in routers_of(model).values())
    return [line for total in totals if isinstance(total, RankTotal) for line in total.lines]


@contextmanager
def totals_of_this_rank(model: nn.Module) -> Iterator[None]:
    """Inside, the routers of `model` send nothing."""
    before = {router: router.total for router in routers_of(model).values()}
    share_totals(model, torch.Tensor.clone)
    try:
        yield
    finally:
        for router, total in before.items():
            router.total = total
