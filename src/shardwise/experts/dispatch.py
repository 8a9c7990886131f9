"""Tokens to the ranks that have their experts, and what those make of them back again.

[Note: who takes part] Every rank of the axis enters each all-to-all, also one that has no tokens or whose experts get
none: its outputs depend on its parameters all the same, so that its backward meets those of the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.comm import Collectives, Group
from shardwise.errors import StateError
from shardwise.experts.assignment import assign
from shardwise.placement import Span

Tensor = torch.Tensor
SUBJECT = "tokens"


class ExpertRanks:
    """The ranks along `ep` that share in the experts of a model. All of them call, in one order; everything blocks."""

    def __init__(self, collectives: Collectives, group: Group) -> None:
        self._collectives = collectives
        self._group = group

    @property
    def place(self) -> int:
        """This rank's, counted from 0."""
        return self._group.index

    def deal(self, sent: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        """Send `sent[i]`, contiguous, to place i, and fill `arrived[i]` from it."""
        outgoing, incoming = ([part.view(-1) for part in parts] for parts in (sent, arrived))
        incoming[self.place].copy_(outgoing[self.place])
        incoming[self.place] = outgoing[self.place]
        self._collectives.all_to_all(incoming, outgoing, self._group, SUBJECT).wait()


class DispatchedExperts:
    """In the place of the forward of a module of experts, of which this rank has those of `deals[place]`.

    Its own forward, that of its class, is given each row that has come for one of them, as a token with one choice.
    """

    def __init__(self, module: nn.Module, ranks: ExpertRanks, deals: Sequence[Span]) -> None:
        self._module = module
        self._ranks = ranks
        self._deals = tuple(deals)
        self._num_experts = deals[-1].stop

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError("A model whose experts lie on several ranks cannot be copied.")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
        """See `Experts.forward`; numbers in `top_k_index` are those of the whole model's experts."""
        assignment = assign(top_k_index, self._num_experts, drops=bool(getattr(self._module, "drops", False)))
        counts = self._counts(assignment.counts)
        sent = [int(assignment_part.sum()) for assignment_part in self._by_place(assignment.counts.cpu())]
        arriving = [sum(of_rank) for of_rank in counts]
        rows = swap(assignment.rows(hidden_states), sent, arriving, self._ranks)
        made = swap(self._computed(rows, counts, top_k_weights), arriving, sent, self._ranks)
        return assignment.combine(made, top_k_weights)

    def _by_place(self, counts: Tensor) -> list[Tensor]:
        return list(counts.split([span.numel for span in self._deals]))

    def _counts(self, counts: Tensor) -> list[list[int]]:
        """Of each rank, how many rows come from it for each of this rank's experts."""
        own = self._deals[self._ranks.place].numel
        told = counts.new_empty(len(self._deals), own)
        self._ranks.deal([part.contiguous() for part in self._by_place(counts)], list(told))
        found: list[list[int]] = told.tolist()
        return found

    def _computed(self, rows: Tensor, counts: Sequence[Sequence[int]], weights: Tensor | None) -> Tensor:
        """What this rank's experts make of `rows`, which lie rank by rank and then expert by expert."""
        forward: Callable[..., Tensor] = type(self._module).forward
        if not rows.shape[0]:  # see [Note: who takes part]
            return rows + sum(param.view(-1)[:0].sum() for param in self._module.parameters()).to(rows.dtype)
        experts = torch.arange(len(counts[0])).repeat(len(counts))
        times = torch.tensor(list(itertools.chain.from_iterable(counts)))
        index = experts.repeat_interleave(times).to(rows.device).unsqueeze(1)
        ones = None if weights is None or accepts_no_weights(self._module) else weights.new_ones(rows.shape[0], 1)
        return forward(self._module, rows, index, ones)


def accepts_no_weights(module: nn.Module) -> bool:
    """Whether its forward can be told that all weights are 1."""
    return hasattr(module, "drops")


def swap(rows: Tensor, sent: Sequence[int], arriving: Sequence[int], ranks: ExpertRanks) -> Tensor:
    """Rows `[sum(sent), width]`, those for place 0 first, to where they belong; returns what has come,
    `[sum(arriving), width]`, from place 0 first. Backward: the way back."""
    made: Tensor = _Swap.apply(rows, tuple(sent), tuple(arriving), ranks)  # type: ignore[no-untyped-call]
    return made


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], arriving: tuple[int, ...], ranks: ExpertRanks) -> Tensor:
        ctx.args = arriving, sent, ranks
        arrived = rows.new_empty(sum(arriving), rows.shape[1])
        ranks.deal(rows.detach().contiguous().split(sent), arrived.split(arriving))
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return swap(grad, *ctx.args), None, None, None
