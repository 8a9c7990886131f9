"""Which tokens go to which experts: choices sorted by expert, and the inverse permutation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwise.errors import ModelError
from shardwise.system.torch_private import FakeTensor

Tensor = torch.Tensor


def require_rows(index: Tensor) -> None:
    """Raise unless the choices `index` have one row for each token."""
    if index.dim() != 2:
        raise ModelError(
            f"Experts are called with choices of shape {list(index.shape)}, where [tokens, top_k] is meant: call them "
            f"with hidden.flatten(0, -2), and with choices and weights of as many rows; view_as(hidden) undoes it."
        )


@dataclass(frozen=True)
class Assignment:
    """The choices of `num_tokens` tokens, `top_k` each, in the order of the experts.

    `order`, int64, has the kept choices as positions in `index.flatten()`, those of expert 0 first. `counts`, int64
    `[num_experts]`, is the number of choices per expert.
    """

    order: Tensor
    counts: Tensor
    num_tokens: int
    top_k: int

    @cached_property
    def is_all(self) -> bool:
        """Whether no choice was dropped."""
        return self.order.shape[0] == self.num_tokens * self.top_k

    @cached_property
    def back(self) -> Tensor:
        """The inverse of `order`, if no choice was dropped."""
        return _inverse(self.order)

    def rows(self, hidden: Tensor) -> Tensor:
        """One row of `hidden` `[num_tokens, width]` per choice, in the order of the experts."""
        return _chosen(hidden, self) if self.is_all else hidden[self.order // self.top_k]

    def combine(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """For each token the sum of the `rows` of its choices, weighted by `weights` `[num_tokens, top_k]` if given.

        Sums are computed in the wider dtype of rows and weights and returned in the dtype of the rows. A dropped choice
        adds nothing.
        """
        width = rows.shape[1]
        if self.is_all:
            by_choice = permuted(rows, self.back, self.order)
        else:
            by_choice = rows.new_zeros(self.num_tokens * self.top_k, width).index_copy(0, self.order, rows)
        by_choice = by_choice.view(self.num_tokens, self.top_k, width)
        if weights is not None:
            by_choice = by_choice * weights.unsqueeze(-1)
        return (by_choice[:, 0] if self.top_k == 1 else by_choice.sum(1)).to(rows.dtype)


def permuted(rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
    """`rows[there]`, where `there` and `back` are inverse permutations. Torch's own backward would accumulate row by
    row, as if some rows came twice."""
    made: Tensor = _Permuted.apply(rows, there, back)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.permutations = back, there
        return rows[there]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return permuted(grad, *ctx.permutations), None, None


def _chosen(hidden: Tensor, assignment: Assignment) -> Tensor:
    """Each token's hidden state once per choice. Backward: the sum over its choices, in their order."""
    made: Tensor = _Chosen.apply(hidden, assignment)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, assignment: Assignment) -> Tensor:
        ctx.assignment = assignment
        return hidden[assignment.order // assignment.top_k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        one: Assignment = ctx.assignment
        by_choice = permuted(grad, one.back, one.order).view(one.num_tokens, one.top_k, grad.shape[1])
        return by_choice.sum(1), None


def assign(index: Tensor, num_experts: int, capacity: int | None = None) -> Assignment:
    """Sort the choices `index` `[num_tokens, top_k]`, which are expert numbers. With a `capacity` (the most choices per
    expert), `index` may contain `num_experts` for a dropped choice; counting the kept ones then synchronizes with the
    device."""
    num_tokens, top_k = index.shape
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = num_per_expert(flat, num_experts + (capacity is not None))
    if capacity is not None:
        order = order[: _num_kept(counts, flat.shape[0], num_experts * capacity)]
        counts = counts[:-1]
    return Assignment(order, counts, num_tokens, top_k)


def _num_kept(counts: Tensor, num_choices: int, most: int) -> int:
    """How many choices were kept; in a rehearsal the maximum, because values are unknown."""
    return min(num_choices, most) if is_rehearsed(counts) else num_choices - int(counts[-1])


def is_rehearsed(tensor: Tensor) -> bool:
    """Whether `tensor` is a fake tensor, with a shape but no values."""
    return isinstance(tensor, FakeTensor)


def num_per_expert(index: Tensor, num_experts: int) -> Tensor:
    """How often each expert occurs in `index`: int64 `[num_experts]`."""
    flat = index.reshape(-1)
    return flat.new_zeros(num_experts, dtype=torch.int64).scatter_add_(0, flat, torch.ones_like(flat))


def capacity_of(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """How many choices of this rank's tokens an expert accepts: with `factor` 1, its share under an even load."""
    return max(1, math.ceil(factor * num_tokens * top_k / num_experts))


def dropped_over(index: Tensor, num_experts: int, capacity: int) -> Tensor:
    """`index` with `num_experts` in place of choices over an expert's capacity: first choices come before second ones,
    and earlier tokens before later ones (GShard, arXiv:2006.16668)."""
    by_choice = index.t().reshape(-1)
    order = torch.argsort(by_choice, stable=True)
    counts = num_per_expert(by_choice, num_experts)
    starts = counts.cumsum(0) - counts
    position = _inverse(order) - starts[by_choice]
    kept = torch.where(position < capacity, by_choice, num_experts)
    return kept.view(index.shape[1], index.shape[0]).t()


def _inverse(order: Tensor) -> Tensor:
    """The inverse permutation. It avoids `torch.arange`, which under sequence parallelism would be taken for position
    ids."""
    return torch.empty_like(order).scatter_(0, order, torch.ones_like(order).cumsum(0) - 1)
