"""Experts that multiply in 8 bits: those of `shardwise.experts`, and stacked ones of transformers.

Each expert's products are those of a linear layer for the tokens that it gets: so are torchao's grouped ones, whose
scales are of one expert's rows and columns too. They are computed one after the other. An expert without tokens
multiplies nothing, and has gradients of zeros.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from shardwise.parallel.experts import Experts
from shardwise.parallel.experts.assignment import assign
from shardwise.parallel.experts.products import linear_by_group
from shardwise.parallel.fp8.linear import fp8_linear
from shardwise.parallel.fp8.recipes import Recipe

Tensor = torch.Tensor
_SAID = ("num_experts", "has_gate", "has_bias", "is_transposed", "_apply_gate")
"""How experts of transformers say what they compute, to its `ExpertsInterface`."""


class Fp8Experts(Experts):
    """`shardwise.experts.Experts` under the plan's `fp8`."""

    recipe: Recipe

    def multiply(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        return _multiply(rows, weights, counts, self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.name}"


class Fp8StackedExperts(nn.Module):
    """Experts of transformers under the plan's `fp8`: what its `grouped_mm_experts_forward` computes."""

    recipe: Recipe

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `Experts.forward`."""
        assignment = assign(top_k_index, self.num_experts)  # type: ignore[arg-type]  # an attribute of these modules
        counts = assignment.counts
        inner = self._linear("gate_up_proj" if self.has_gate else "up_proj", assignment.rows(hidden_states), counts)
        inner = (self._apply_gate if self.has_gate else self.act_fn)(inner)  # type: ignore[operator]  # likewise
        made = self._linear("down_proj", inner, counts)
        return assignment.combine(made, top_k_weights).to(hidden_states.dtype)

    def _linear(self, name: str, rows: Tensor, counts: Tensor) -> Tensor:
        weights: Tensor = getattr(self, name)  # which may be a parametrization
        made = _multiply(rows, weights.mT if self.is_transposed else weights, counts, self.recipe)
        if not self.has_bias:
            return made
        bias: Tensor = getattr(self, f"{name}_bias").to(made.dtype)
        return made + bias.repeat_interleave(counts, 0, output_size=rows.shape[0])

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}fp8={self.recipe.name}"


def says_what_it_computes(module: nn.Module) -> bool:
    """Whether `Fp8StackedExperts` can compute it."""
    return all(hasattr(module, name) for name in _SAID) and not getattr(module, "has_post_expert_norm", False)


def _multiply(rows: Tensor, weights: Tensor, counts: Tensor, recipe: Recipe) -> Tensor:
    """`grouped_linear` in 8 bits."""
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)

    def linear(part: Tensor, weight: Tensor) -> Tensor:
        return fp8_linear(part, weight, recipe) if part.shape[0] else functional.linear(part, weight)

    return linear_by_group(rows, weights, counts, linear)
