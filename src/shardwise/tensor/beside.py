"""Sums of a region's input gradients, beside the products that make its weight gradients.

[Note: sums beside products] In the backward of column modules the gradient of what they read is a sum over ranks, for
which the layer before them waits; the gradients of their weights are for nobody but this rank. So, on devices, the sum
is started first and waited for behind the weight gradients (Megatron-LM's asynchronous tensor-parallel all-reduce,
arXiv:2205.05198). Autograd takes of all nodes that are ready the one that was made last. A region is entered through
`_Await`, then `_Later` for every weight, then `_Send`; a column's backward leaves what its weight's gradient needs to
its `_Later`. Backwards then: the columns' inputs, `_Send` (starts the sum), every `_Later` (weights), `_Await`.

Which columns enter together is known from the forward before; in the first it is the one that enters alone. Where a
graph is made of a backward (`create_graph`), everything is done at once and in plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from shardwise.comm import Line, Sum
from shardwise.errors import CommError
from shardwise.tensor.functions import apply, reduce_from, reduce_scatter_from
from shardwise.tensor.products import Left, Part, product

Tensor = torch.Tensor


class SumBeside:
    """The sum of one region's input gradients, from its start to the one who waits for it."""

    def __init__(self, line: Line, dim: int | None, sizes: Sequence[int], under_way: set[SumBeside]) -> None:
        """With `dim` this rank gets its part of the sum along it, of `sizes`; without, all of it. In `under_way` while
        it is."""
        self.line, self.dim, self.sizes = line, dim, tuple(sizes)
        self._under_way = under_way
        self._sum: Sum | None = None

    def start(self, grad: Tensor) -> Tensor:
        """Returns what only has the shape and dtype of the sum."""
        self._under_way.add(self)
        if self.dim is None:
            self._sum = self.line.start_sum(grad)
        else:
            self._sum = self.line.start_sum_part(grad, self.dim, self.sizes)
        shape = list(grad.shape)
        if self.dim is not None:
            shape[self.dim] = self.sizes[self.line.place]
        return grad.new_empty(()).expand(shape)

    def plain(self, grad: Tensor) -> Tensor:
        """The same at once, with a graph."""
        if self.dim is None:
            return reduce_from(grad, self.line)
        return reduce_scatter_from(grad, self.line, self.dim, self.sizes)

    def wait(self, grad: Tensor) -> Tensor:
        """The sum that was started; `grad` if none was."""
        started, self._sum = self._sum, None
        self._under_way.discard(self)
        return grad if started is None else started.wait()

    def give_up(self) -> None:
        """The backward has failed that would have waited."""
        self._under_way.discard(self)
        started, self._sum = self._sum, None
        if started is not None:
            with suppress(CommError):  # it has been complained about already
                started.wait()


class LaterWeight:
    """One column's weight as its forward uses it, and what its gradient will be made of."""

    def __init__(self, weight: Tensor) -> None:
        self._left = Left()
        self._tensor = apply(_Later, weight, self._left)

    def product(self, inputs: Tensor, bias: Tensor | None, part: Part | None, *, is_conv1d: bool) -> Tensor:
        """What the column computes. Asked once."""
        self._left.is_conv1d = is_conv1d
        return product(inputs, self._tensor, bias, is_conv1d=is_conv1d, part=part, left=self._left)


def awaited(tensor: Tensor, beside: SumBeside) -> Tensor:
    """`tensor` itself. Backward: waits for the sum."""
    return apply(_Await, tensor, beside)


def sent(tensor: Tensor, beside: SumBeside) -> Tensor:
    """What columns read of `tensor`: itself, or the parts of all ranks. Backward: starts the sum."""
    return apply(_Send, tensor, beside)


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, beside: SumBeside) -> Tensor:
        ctx.beside = beside
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.beside.wait(grad), None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, beside: SumBeside) -> Tensor:
        ctx.beside = beside
        if beside.dim is None:
            return tensor.view_as(tensor)
        return beside.line.concatenate(tensor, beside.dim, beside.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.beside.plain(grad) if torch.is_grad_enabled() else ctx.beside.start(grad), None


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, left: Left) -> Tensor:
        ctx.left = left
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = ctx.left.of_weight()
        if made is None:
            return grad, None
        is_all = grad.data_ptr() == ctx.left.instead.data_ptr()  # a graph of a backward may have used the weight too
        return made if is_all else made + grad, None
