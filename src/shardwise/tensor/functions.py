"""Autograd functions between the ranks of a tensor-parallel line (Megatron-LM, arXiv:1909.08053 and 2205.05198).

A tensor is *replicated* if all ranks of the line have the same, *cut* if each has its part along one dimension, and
*partial* if each has a summand. Gradients of replicated tensors are replicated, those of cut ones cut. Each function's
backward is another of them, so gradients of gradients work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Line

Tensor = torch.Tensor


def copy_to(tensor: Tensor, line: Line) -> Tensor:
    """A replicated tensor as what cut modules read. Backward: the gradients of the ranks are summed."""
    return apply(_CopyTo, tensor, line) if line.num_ranks > 1 else tensor


def reduce_from(tensor: Tensor, line: Line) -> Tensor:
    """The sum of a partial tensor, replicated. Backward: the gradient as it is."""
    return apply(_ReduceFrom, tensor, line) if line.num_ranks > 1 else tensor


def scatter_to(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of a replicated tensor; `sizes` are those of the ranks. Backward: gathered."""
    return apply(_ScatterTo, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def gather_from(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """A cut tensor whole on every rank, to be used by all in the same way. Backward: this rank's part."""
    return apply(_GatherFrom, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def gather_to(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """A cut tensor whole on every rank, as what cut modules read. Backward: this rank's part of the gradients' sum."""
    return apply(_GatherTo, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def reduce_scatter_from(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of the sum of a partial tensor. Backward: gathered."""
    return apply(_ReduceScatterFrom, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def apply(function: Any, *args: object) -> Tensor:
    """`function.apply`, which torch has left without types."""
    made: Tensor = function.apply(*args)
    return made


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_from(grad, ctx.line), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line) -> Tensor:
        ctx.line = line
        return line.sum(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return copy_to(grad, ctx.line), None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.args = line, dim, sizes
        own = tensor.narrow(dim, sum(sizes[: line.place]), sizes[line.place])
        return own.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_from(grad, *ctx.args), None, None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.args = line, dim, sizes
        return line.concatenate(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter_to(grad, *ctx.args), None, None, None


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.args = line, dim, sizes
        return line.concatenate(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return reduce_scatter_from(grad, *ctx.args), None, None, None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.args = line, dim, sizes
        return line.sum_part(tensor, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_to(grad, *ctx.args), None, None, None
