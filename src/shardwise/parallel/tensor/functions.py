"""Autograd functions between the ranks of a tensor-parallel line (Megatron-LM, arXiv:1909.08053 and 2205.05198).

A tensor is *replicated* if all ranks of the line have the same values, *sharded* if each has a part along one
dimension, and *partial* if the tensor is the sum over ranks. Gradients of replicated tensors are replicated, those of
sharded tensors are sharded. The backward of each function is another one of them, so double backward works.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Line
from shardwise.plan.placement import Span

Tensor = torch.Tensor


def own_words(words: Tensor, own: Span) -> tuple[Tensor, Tensor]:
    """Where `words` are in this rank's part of the vocabulary, and which of them are there; others have the place 0."""
    is_here = (words >= own.start) & (words < own.stop)
    return (words - own.start).masked_fill(~is_here, 0), is_here


def copy_to(tensor: Tensor, line: Line) -> Tensor:
    """A replicated tensor as the input of split modules. Backward: the gradients are summed over ranks."""
    return apply(_CopyTo, tensor, line) if line.num_ranks > 1 else tensor


def reduce_from(tensor: Tensor, line: Line) -> Tensor:
    """The sum of a partial tensor, replicated. Backward: the gradient unchanged."""
    return apply(_ReduceFrom, tensor, line) if line.num_ranks > 1 else tensor


def scatter_to(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of a replicated tensor; `sizes` are the sizes of all ranks' parts. Backward: an
    all-gather."""
    return apply(_ScatterTo, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def gather_from(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """A sharded tensor, gathered on every rank for the same use by all of them. Backward: this rank's part."""
    return apply(_GatherFrom, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def gather_to(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """A sharded tensor, gathered on every rank as the input of split modules. Backward: a reduce-scatter."""
    return apply(_GatherTo, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def reduce_scatter_from(tensor: Tensor, line: Line, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's part along `dim` of the sum of a partial tensor. Backward: an all-gather."""
    return apply(_ReduceScatterFrom, tensor, line, dim, tuple(sizes)) if line.num_ranks > 1 else tensor


def apply(function: Any, *args: object) -> Tensor:
    """`function.apply`, which has no types in torch."""
    try:
        made: Tensor = function.apply(*args)
    except RuntimeError as error:
        if "Batching rule" in str(error):
            error.add_note(
                "Gradients of several outputs at once (torch.autograd.grad(..., is_grads_batched=True), "
                "functional.jacobian(..., vectorize=True)) cannot be sums over ranks of tp. Call torch.autograd.grad "
                "for each output, or leave that argument out."
            )
        if "jvp function" in str(error):
            error.add_note(
                "Tangents of forward-mode differentiation are not summed over ranks of tp. "
                "torch.autograd.functional.jvp(..., create_graph=True) computes the same by backwards."
            )
        raise
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
        own = tensor.narrow(dim, sum(sizes[: line.index]), sizes[line.index])
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
