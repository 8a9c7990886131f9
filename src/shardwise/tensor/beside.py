"""Collectives of a region's backward, beside the products of its column modules.

[Note: sums beside products] In the backward of column modules the gradient of what they read is a sum over ranks, for
which the layer before them waits; the gradients of their parameters are for nobody but this rank. So, where the ranks'
communicator goes on by itself (`Line.runs_beside`: on devices, and between hosts), the sum is started first and waited
for behind the parameters' gradients; and what `tensor.sequence` has left in parts is gathered again beside the products
that make the gradient to be summed (Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`, arXiv:2205.05198,
section 4.2.2). Autograd takes of all nodes that are ready the one that was made last. A region is entered through
`_Await`, then `_Later` for the parameters of every column, then `_Send`; a column's backward leaves what the gradients
of its parameters need to its `_Later`. Backwards then: the columns' inputs (the first starts the gather), `_Send`
(starts the sum), every `_Later` (the first waits for the gather), `_Await` (waits for the sum).

Which columns enter together is known from the forward before; in the first it is the one that enters alone. Where a
graph is made of a backward (`create_graph`), everything is done at once and in plain functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Line
from shardwise.tensor.functions import apply, reduce_from, reduce_scatter_from
from shardwise.tensor.products import Left, Part, UnderWay, product

Tensor = torch.Tensor


class SumBeside:
    """The sum of one region's input gradients."""

    def __init__(self, line: Line, dim: int | None, sizes: Sequence[int], under_way: set[UnderWay]) -> None:
        """With `dim` this rank gets its part of the sum along it, of `sizes`; without, all of it."""
        self.line, self.dim, self.sizes = line, dim, tuple(sizes)
        self._under_way = UnderWay(under_way)

    def start(self, grad: Tensor) -> None:
        if self.dim is None:
            self._under_way.start(self.line.start_sum(grad))
        else:
            self._under_way.start(self.line.start_sum_part(grad, self.dim, self.sizes))

    def plain(self, grad: Tensor) -> Tensor:
        """The same at once, with a graph."""
        if self.dim is None:
            return reduce_from(grad, self.line)
        return reduce_scatter_from(grad, self.line, self.dim, self.sizes)

    def wait(self) -> Tensor | None:
        """The sum; `None` if none was started."""
        return self._under_way.wait()


class LaterParams:
    """One column's parameters as its forward uses them, and what their gradients will be made of."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """A `bias` that has no gradient is better left out."""
        self.left = Left()
        self.weight: Tensor
        self.bias: Tensor | None
        self.weight, self.bias = _Later.apply(weight, bias, self.left)  # type: ignore[no-untyped-call]

    def product(
        self, inputs: Tensor, bias: Tensor | None, part: Part | None, *, is_conv1d: bool, dtype: torch.dtype | None
    ) -> Tensor:
        """What the column computes with its `bias`. Asked once."""
        bias = bias if self.bias is None else self.bias
        return product(inputs, self.weight, bias, is_conv1d=is_conv1d, dtype=dtype, part=part, left=self.left)


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
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        found = ctx.beside.wait()
        return grad if found is None else found, None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, beside: SumBeside) -> Tensor:
        ctx.beside = beside
        if beside.dim is None:
            return tensor.view_as(tensor)
        return beside.line.concatenate(tensor, beside.dim, beside.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            return ctx.beside.plain(grad), None
        ctx.beside.start(grad)
        return None, None  # `_Await` has it


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, left: Left) -> Any:
        ctx.left = left
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """`given` is what has not been left: by a graph of a backward, or another use of the parameters."""
        of_weight, of_bias = ctx.left.grads(weight=ctx.needs_input_grad[0], bias=ctx.needs_input_grad[1])
        return _added(of_weight, given[0]), _added(of_bias, given[1]), None


def _added(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
