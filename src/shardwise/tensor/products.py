"""Products of column modules whose backwards do less at once, or hold less, than torch's own.

[Note: gathered again] With `tensor.sequence` the columns of a region read the whole sequence, of which every rank has
its part. Saved for the backward is the part alone: the whole is gathered again when the first of the columns is
differentiated, and let go behind the last (Megatron-LM's sequence parallelism, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shardwise.comm import Line
from shardwise.storage import is_at_rest
from shardwise.tensor.functions import apply, gather_to

Tensor = torch.Tensor


class Left:
    """What the backward of a column has left for its weight's gradient: see [Note: sums beside products]."""

    __slots__ = ("grad", "inputs", "instead", "is_conv1d")

    def __init__(self) -> None:
        self.is_conv1d = False
        self.instead = torch.empty(0)
        """What autograd was given for the time being: zeros."""
        self.inputs: Tensor | None = None
        self.grad: Tensor | None = None

    def of_weight(self) -> Tensor | None:
        """The weight's gradient; `None` if nothing was left."""
        inputs, grad, self.inputs, self.grad = self.inputs, self.grad, None, None
        return None if inputs is None or grad is None else _of_weight(inputs, grad, is_conv1d=self.is_conv1d)


class GatheredAgain:
    """What the columns of one region read, gathered from the ranks' parts whenever a backward wants it."""

    def __init__(self, line: Line, dim: int, sizes: Sequence[int]) -> None:
        """`sizes` are those of the ranks' parts along `dim`."""
        self._args = line, dim, tuple(sizes)
        self._num_columns = 0
        self._num_waiting = 0
        self._whole: Tensor | None = None

    def count_column(self) -> None:
        """One more column reads it, and takes it once in a backward."""
        self._num_columns += 1

    def take(self, own: Tensor) -> Tensor:
        """The whole, of `own` as it was saved."""
        if torch.is_grad_enabled():
            return gather_to(own, *self._args)
        if self._whole is None:
            line, dim, sizes = self._args
            self._whole, self._num_waiting = line.concatenate(own, dim, sizes), self._num_columns
        whole = self._whole
        self._num_waiting -= 1
        if not self._num_waiting:
            self._whole = None
        return whole


class Part(NamedTuple):
    """Of what columns read, what this rank has, and how it gets the others' again."""

    own: Tensor
    again: GatheredAgain


class _How(NamedTuple):
    is_conv1d: bool
    again: GatheredAgain | None
    left: Left | None


def product(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_conv1d: bool,
    part: Part | None = None,
    left: Left | None = None,
) -> Tensor:
    """`inputs @ weight.T + bias`, without transposing for a Conv1D. A `part` of `inputs` is saved in their place; with
    `left` the gradient of `weight` is left to whoever asks it."""
    own, again = (None, None) if part is None else part
    if again is not None:
        again.count_column()
    return apply(_Product, inputs, own, weight, bias, _How(is_conv1d, again, left))


def has_own_backward(weight: Tensor) -> bool:
    """Whether a product with `weight` can be one of these."""
    return (
        torch.is_grad_enabled()
        and not (isinstance(weight, nn.Parameter) and is_at_rest(weight))
        and weight.requires_grad
        and not torch.is_autocast_enabled(weight.device.type)
        and not torch.compiler.is_compiling()
    )


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, own: Tensor | None, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        ctx.save_for_backward(inputs if own is None else own, weight)
        ctx.how = how
        return functional.linear(inputs, weight.t() if how.is_conv1d else weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, weight = ctx.saved_tensors
        is_conv1d, again, left = ctx.how.is_conv1d, ctx.how.again, ctx.how.left
        inputs = saved if again is None else again.take(saved)
        of_input = grad @ (weight.t() if is_conv1d else weight) if ctx.needs_input_grad[0] else None
        of_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
        if not ctx.needs_input_grad[2]:
            of_weight = None
        elif left is None or torch.is_grad_enabled():
            of_weight = _of_weight(inputs, grad, is_conv1d=is_conv1d)
        else:
            left.inputs, left.grad = inputs, grad
            of_weight = left.instead = weight.new_zeros(()).expand(weight.shape)
        return of_input, None, of_weight, of_bias, None


def _of_weight(inputs: Tensor, grad: Tensor, *, is_conv1d: bool) -> Tensor:
    rows, sums = inputs.flatten(0, -2), grad.flatten(0, -2)
    return rows.t() @ sums if is_conv1d else sums.t() @ rows
