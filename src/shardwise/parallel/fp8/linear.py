"""Linear layers that multiply in 8 bits. Their parameters are plain ones, and are rounded in each product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from shardwise.comm import Line
from shardwise.parallel.fp8.kernels import KERNELS
from shardwise.parallel.fp8.recipes import Recipe, Rounding
from shardwise.parallel.fp8.rounding import Rounded, product, rounded
from shardwise.system.torch_private import unwatched

Tensor = torch.Tensor
Dim = Literal["tokens", "in", "out"]


@dataclass(frozen=True)
class Split:
    """Of which features each rank along a `line` has some: `out` for a column, `in` for a row."""

    line: Line
    dim: Dim


class Fp8Linear(nn.Linear):
    """`nn.Linear` under the plan's `fp8`. Its codes and scales live as long as a product."""

    recipe: Recipe

    def forward(self, input: Tensor) -> Tensor:
        """Like `nn.Linear`, for an input of shape [..., in]."""
        made = self.multiply(input, self.weight)
        return made if self.bias is None else made + self.bias.to(made.dtype)

    @unwatched
    def multiply(self, input: Tensor, weight: Tensor, split: Split | None = None) -> Tensor:
        """`input @ weight.T`. With a `split`, both are this rank's parts, and the ranks of its line call together."""
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input, weight = input.to(dtype), weight.to(dtype)
        if input.numel() == 0:
            return functional.linear(input, weight)
        made = fp8_linear(input.reshape(-1, input.shape[-1]), weight, self.recipe, split)
        return made.view(*input.shape[:-1], made.shape[-1])

    def multiply_split(self, input: Tensor, weight: Tensor, line: Line, dim: Dim) -> Tensor:
        """`multiply` of this rank's parts, of which each rank of `line` has some features of `dim`."""
        return self.multiply(input, weight, Split(line, dim))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.recipe.name}"


@unwatched
def fp8_linear(tokens: Tensor, weight: Tensor, recipe: Recipe, split: Split | None = None) -> Tensor:
    """`tokens @ weight.T` for `[tokens, in]` and `[out, in]`, neither empty."""
    kernel = None if tokens.device.type == "cpu" else KERNELS.get(recipe.name)
    if kernel is not None:  # its blocks lie within a rank's part
        return kernel(tokens, weight)
    made: Tensor = _Fp8Product.apply(tokens, weight, recipe, split)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _Fp8Product(torch.autograd.Function):
    """`tokens @ weight.T` for `[tokens, in]` and `[out, in]`, of which both are saved in their own dtypes: saved codes
    would take more, where several layers read the same input."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, recipe: Recipe, split: Split | None) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.recipe, ctx.split = recipe, split
        left, right = recipe.output
        return product(
            _rounded(tokens, left, recipe, ("tokens", "in"), split),
            _rounded(weight, right, recipe, ("out", "in"), split),
            tokens.dtype,
            fast=True,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        recipe, split = ctx.recipe, ctx.split
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            left, right = recipe.input_grad
            input_grad = product(
                _rounded(grad, left, recipe, ("tokens", "out"), split),
                _rounded(weight.t(), right, recipe, ("in", "out"), split),
                tokens.dtype,
            )
        if ctx.needs_input_grad[1] and recipe.weight_grad is None:
            weight_grad = torch.mm(grad.t(), tokens).to(weight.dtype)
        elif ctx.needs_input_grad[1]:
            left, right = recipe.weight_grad
            weight_grad = product(
                _rounded(grad.t(), left, recipe, ("out", "tokens"), split),
                _rounded(tokens.t(), right, recipe, ("in", "tokens"), split),
                weight.dtype,
            )
        return input_grad, weight_grad, None, None


def _rounded(matrix: Tensor, rounding: Rounding, recipe: Recipe, dims: tuple[Dim, Dim], split: Split | None) -> Rounded:
    """One factor, with the scales that it would have whole: where blocks span a dimension of which each rank has a
    part, they have the largest element of all ranks."""
    largest: Callable[[Tensor], Tensor] | None = None
    if split is not None:
        spanned = [dim for dim, size in zip(dims, (rounding.rows, rounding.contracted), strict=True) if size is None]
        largest = split.line.largest if split.dim in spanned else None
    return rounded(matrix, rounding, recipe.scale, largest)
