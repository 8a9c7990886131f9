"""Sends tokens to the ranks that have their experts, and the results back.

[Note: every rank takes part] Every rank of the axis enters each all-to-all, even one without tokens or whose experts
receive none. Its output then still depends on its parameters, so that its backward joins the collectives of the others.

The module's own forward runs, so its activations, biases and clamps need no code here, and gradients of the weights
stay on the token's rank. Experts that are modules in a list are refused: a forward that calls them one by one knows
each result before the next call, so ranks would compute one after the other.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.parallel.experts.assignment import Assignment, assign, require_rows
from shardwise.parallel.experts.layer import Experts
from shardwise.plan.placement import Span
from shardwise.runtime import decided
from shardwise.system.even_parts import even_sizes

Tensor = torch.Tensor
EXPERT_LOAD = 1.5
"""The load of a rank's experts that a rehearsal assumes, as a multiple of an even share of the tokens. The worst case,
all tokens of all ranks, overestimates by the number of ranks, and would be useless for planning."""


class DispatchedExperts:
    """Replaces the forward of a module of experts, of which this rank has those in `deals[index]`.

    The original forward of the module's class is called with each received row as a token with one choice.
    """

    def __init__(self, module: nn.Module, line: Line, deals: Sequence[Span]) -> None:
        self._module = module
        self.line = line
        self._deals = tuple(deals)
        self._num_experts = deals[-1].stop

    def __deepcopy__(self, memo: dict[int, Any]) -> RehearsedExperts:
        """Copies are made for rehearsals only, because a sharded model itself cannot be copied."""
        return RehearsedExperts(copy.deepcopy(self._module, memo), copy.deepcopy(self.line, memo), self._deals)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
        """As `Experts.forward`; `top_k_index` numbers the experts of the whole model."""
        assignment = self._assignment(top_k_index)
        counts = decided(lambda: self._counts(assignment.counts))
        sent = [int(part.sum()) for part in self._by_rank(assignment.counts.cpu())]
        arriving = [sum(of_rank) for of_rank in counts]
        rows = swap(assignment.rows(hidden_states), sent, arriving, self.line)
        made = swap(self._computed(rows, counts, top_k_weights), arriving, sent, self.line)
        return assignment.combine(made, top_k_weights)

    def _assignment(self, top_k_index: Tensor) -> Assignment:
        require_rows(top_k_index)
        return assign(decided(lambda: top_k_index), self._num_experts, self._capacity(top_k_index))

    def _capacity(self, top_k_index: Tensor) -> int | None:
        """The most rows that this rank sends to one expert; `None` without a capacity."""
        num_tokens, top_k = top_k_index.shape
        module = self._module
        return module.capacity(num_tokens, top_k, self._num_experts) if isinstance(module, Experts) else None

    def _by_rank(self, counts: Tensor) -> list[Tensor]:
        return list(counts.split_with_sizes([span.numel for span in self._deals]))

    def _counts(self, counts: Tensor) -> list[list[int]]:
        """For each rank, how many rows it sends to each of this rank's experts."""
        found: list[list[int]] = torch.stack(self._told(counts)).tolist()
        return found

    def _told(self, counts: Tensor) -> list[Tensor]:
        own = self._deals[self.line.index].numel
        return self.line.deal(self._by_rank(counts), [torch.Size([own])] * self.line.num_ranks)

    def _computed(self, rows: Tensor, counts: Sequence[Sequence[int]], weights: Tensor | None) -> Tensor:
        """The outputs of this rank's experts for `rows`, which are ordered by source rank, then by expert."""
        if not rows.shape[0] and not isinstance(self._module, Experts):  # see [Note: every rank takes part]
            nothing = torch.stack([param.reshape(-1)[:0].sum() for param in self._module.parameters()]).sum()
            return rows + nothing.to(rows.dtype)
        experts = torch.tensor(list(range(len(counts[0]))) * len(counts), device="cpu")
        times = torch.tensor(list(itertools.chain.from_iterable(counts)), device="cpu")
        return self._made_of(rows, experts.repeat_interleave(times).to(rows.device), weights)

    def _made_of(self, rows: Tensor, experts: Tensor, weights: Tensor | None) -> Tensor:
        """The outputs for `rows`, one of `experts` each, numbered from this rank's first expert."""
        index = experts.unsqueeze(1)
        if isinstance(self._module, Experts):
            assignment = assign(index, self._deals[self.line.index].numel)
            return assignment.combine(self._module.made_of(assignment.rows(rows), assignment.counts), None)
        forward: Callable[..., Tensor] = type(self._module).forward
        return forward(self._module, rows, index, None if weights is None else weights.new_ones(rows.shape[0], 1))


class RehearsedExperts(DispatchedExperts):
    """`DispatchedExperts` in a rehearsal, where nothing is sent and the number of received tokens is unknown.

    With a capacity it assumes the most that all ranks may send, otherwise `load` times an even share.
    """

    load = EXPERT_LOAD

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
        assignment = self._assignment(top_k_index)
        num_sent = assignment.order.shape[0]
        num_arriving = self._num_arriving(top_k_index)
        decided(lambda: self._told(assignment.counts))  # what `_counts` sends
        rows = assignment.rows(hidden_states)
        arrived = swap(rows, *self._shares(num_sent, num_arriving), self.line)
        made = self._made_of(arrived, assignment.order.new_zeros(num_arriving), top_k_weights)
        back = swap(made, *self._shares(num_arriving, num_sent), self.line)
        return assignment.combine(back, top_k_weights)

    def _num_arriving(self, top_k_index: Tensor) -> int:
        num_ranks, num_own = self.line.num_ranks, self._deals[self.line.index].numel
        num_choices = top_k_index.numel()
        capacity = self._capacity(top_k_index)
        if capacity is not None:
            return num_ranks * min(num_own * capacity, num_choices)
        even = num_ranks * num_choices * num_own / self._num_experts
        return min(num_ranks * num_choices, math.ceil(self.load * even))

    def _shares(self, num_sent: int, num_arriving: int) -> tuple[list[int], list[int]]:
        """Rows per rank for both totals: even shares, with an equal number for this rank itself in both."""
        num_ranks, here = self.line.num_ranks, self.line.index
        own = min(num_sent, num_arriving) // num_ranks
        shares = []
        for total in (num_sent, num_arriving):
            others = iter(even_sizes(total - own, num_ranks - 1))
            shares.append([own if index == here else next(others) for index in range(num_ranks)])
        return shares[0], shares[1]


@contextmanager
def loaded(twin: nn.Module, load: float) -> Iterator[None]:
    """A context in which the experts of a rehearsed copy receive `load` times an even share of the tokens."""
    for module in twin.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, RehearsedExperts):
            forward.load = load
    yield


def swap(rows: Tensor, sent: Sequence[int], arriving: Sequence[int], line: Line) -> Tensor:
    """Differentiable all-to-all: `rows` `[sum(sent), width]`, ordered by destination rank; returns the received rows
    `[sum(arriving), width]`, ordered by source rank. Backward: the all-to-all in reverse."""
    made: Tensor = _Swap.apply(rows, tuple(sent), tuple(arriving), line)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], arriving: tuple[int, ...], line: Line) -> Tensor:
        ctx.args = arriving, sent, line
        arrived = rows.new_empty(sum(arriving), rows.shape[1])
        outgoing = [part.view(-1) for part in rows.detach().contiguous().split_with_sizes(sent)]
        incoming = [part.view(-1) for part in arrived.split_with_sizes(arriving)]
        incoming[line.index].copy_(outgoing[line.index])
        line.deal_into(incoming, outgoing)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return swap(grad, *ctx.args), None, None, None
