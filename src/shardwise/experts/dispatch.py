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

from shardwise.comm import Line
from shardwise.errors import StateError
from shardwise.experts.assignment import assign
from shardwise.experts.layer import Experts
from shardwise.placement import Span

Tensor = torch.Tensor


class DispatchedExperts:
    """In the place of the forward of a module of experts, of which this rank has those of `deals[place]`.

    Its own forward, that of its class, is given each row that has come for one of them, as a token with one choice.
    """

    def __init__(self, module: nn.Module, line: Line, deals: Sequence[Span]) -> None:
        self._module = module
        self._line = line
        self._deals = tuple(deals)
        self._num_experts = deals[-1].stop

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise StateError("A model whose experts lie on several ranks cannot be copied.")

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
        """See `Experts.forward`; numbers in `top_k_index` are those of the whole model's experts."""
        drops = isinstance(self._module, Experts) and self._module.drops
        assignment = assign(top_k_index, self._num_experts, drops=drops)
        counts = self._counts(assignment.counts)
        sent = [int(part.sum()) for part in self._by_place(assignment.counts.cpu())]
        arriving = [sum(of_rank) for of_rank in counts]
        rows = swap(assignment.rows(hidden_states), sent, arriving, self._line)
        made = swap(self._computed(rows, counts, top_k_weights), arriving, sent, self._line)
        return assignment.combine(made, top_k_weights)

    def _by_place(self, counts: Tensor) -> list[Tensor]:
        return list(counts.split_with_sizes([span.numel for span in self._deals]))

    def _counts(self, counts: Tensor) -> list[list[int]]:
        """Of each rank, how many rows come from it for each of this rank's experts."""
        own = self._deals[self._line.place].numel
        told = self._line.deal(self._by_place(counts), [torch.Size([own])] * self._line.num_ranks)
        found: list[list[int]] = torch.stack(told).tolist()
        return found

    def _computed(self, rows: Tensor, counts: Sequence[Sequence[int]], weights: Tensor | None) -> Tensor:
        """What this rank's experts make of `rows`, which lie rank by rank and then expert by expert."""
        forward: Callable[..., Tensor] = type(self._module).forward
        is_ours = isinstance(self._module, Experts)
        if not rows.shape[0] and not is_ours:  # see [Note: who takes part]
            nothing = torch.stack([param.reshape(-1)[:0].sum() for param in self._module.parameters()]).sum()
            return rows + nothing.to(rows.dtype)
        experts = torch.tensor(list(range(len(counts[0]))) * len(counts))
        times = torch.tensor(list(itertools.chain.from_iterable(counts)))
        index = experts.repeat_interleave(times).to(rows.device).unsqueeze(1)
        ones = None if weights is None or is_ours else weights.new_ones(rows.shape[0], 1)
        return forward(self._module, rows, index, ones)


def swap(rows: Tensor, sent: Sequence[int], arriving: Sequence[int], line: Line) -> Tensor:
    """Rows `[sum(sent), width]`, those for place 0 first, to where they belong; returns what has come,
    `[sum(arriving), width]`, from place 0 first. Backward: the way back."""
    made: Tensor = _Swap.apply(rows, tuple(sent), tuple(arriving), line)  # type: ignore[no-untyped-call]
    return made


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: tuple[int, ...], arriving: tuple[int, ...], line: Line) -> Tensor:
        ctx.args = arriving, sent, line
        arrived = rows.new_empty(sum(arriving), rows.shape[1])
        outgoing = [part.view(-1) for part in rows.detach().contiguous().split_with_sizes(sent)]
        incoming = [part.view(-1) for part in arrived.split_with_sizes(arriving)]
        incoming[line.place].copy_(outgoing[line.place])
        line.deal_into(incoming, outgoing)
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return swap(grad, *ctx.args), None, None, None
