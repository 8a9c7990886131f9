"""Experts that multiply in 8 bits.

Each expert's products are those of a linear layer for the tokens that it gets: so are torchao's grouped ones, whose
scales are of one expert's rows and columns too. They are computed one after the other. An expert without tokens
multiplies nothing, and has gradients of zeros.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwise.parallel.experts import Experts
from shardwise.parallel.experts.products import linear_by_group
from shardwise.parallel.fp8.linear import fp8_linear
from shardwise.parallel.fp8.recipes import Recipe

Tensor = torch.Tensor


class Fp8Experts(Experts):
    """`shardwise.experts.Experts` under the plan's `fp8`."""

    recipe: Recipe

    def multiply(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        return linear_by_group(rows, weights, counts, self._linear)

    def _linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        return fp8_linear(rows, weight, self.recipe) if rows.shape[0] else functional.linear(rows, weight)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.name}"
