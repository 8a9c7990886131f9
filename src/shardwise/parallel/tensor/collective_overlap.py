"""Overlaps the collectives in the backward of column modules with their matrix products.

[Note: overlapped sums] In the backward of column modules, the gradient of their input is summed over ranks, and the
layer before them waits for it. The gradients of their parameters stay on this rank. So where collectives run
asynchronously (`Line.overlaps_compute`: on devices, and between hosts), the sum is started first, and waited for after
the parameter gradients. With `tensor.sequence`, the input is gathered again while the input gradient is computed
(Megatron-LM's `LinearWithGradAccumulationAndAsyncCommunication`, arXiv:2205.05198, section 4.2.2).

Autograd runs, of all nodes that are ready, the one that was created last. A region is entered through `_WaitForSum`,
then `_DeferParamGrads` for the parameters of every column, then `_StartSum`. The backward of a column defers its
parameter gradients to its `_DeferParamGrads`. The backward then runs: input gradients of the columns (the first starts
the gather), `_StartSum` (starts the sum), every `_DeferParamGrads` (the first waits for the gather), `_WaitForSum`
(waits for the sum).

Which columns share a region is known from the previous forward; in the first forward, only the one that enters it is
known. A backward with `create_graph` does everything at once, with plain functions.

One autograd function around all columns of a region, with their parameters as inputs, would need a place for what
happens between columns (rotary positions, norms of heads). Products of a forward are not cut into chunks to overlap
with the gather before them: that means smaller products and more launches, for collectives that compete with them for
the device, and whether it helps can only be measured on several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm import Line
from shardwise.parallel.tensor.column_products import DeferredGrads, PendingCollective, SequencePart, product
from shardwise.parallel.tensor.functions import apply, reduce_from, reduce_scatter_from

Tensor = torch.Tensor


class OverlappedSum:
    """The sum over ranks of the input gradient of one region."""

    def __init__(self, line: Line, dim: int | None, sizes: Sequence[int], pending: set[PendingCollective]) -> None:
        """With a `dim`, this rank gets its part of the sum along it, of `sizes`; with `None` the whole sum."""
        self.line, self.dim, self.sizes = line, dim, tuple(sizes)
        self._pending = PendingCollective(pending)

    def start(self, grad: Tensor) -> None:
        if self.dim is None:
            self._pending.start(self.line.start_sum(grad))
        else:
            self._pending.start(self.line.start_sum_part(grad, self.dim, self.sizes))

    def plain(self, grad: Tensor) -> Tensor:
        """The sum as a differentiable function."""
        if self.dim is None:
            return reduce_from(grad, self.line)
        return reduce_scatter_from(grad, self.line, self.dim, self.sizes)

    def wait(self) -> Tensor | None:
        """The sum, or `None` if none was started."""
        return self._pending.wait()


class DeferredParams:
    """The parameters of one column module, whose gradients are computed later in the backward."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Leave out a `bias` that needs no gradient."""
        self.grads = DeferredGrads()
        self.weight: Tensor
        self.bias: Tensor | None
        self.weight, self.bias = _DeferParamGrads.apply(weight, bias, self.grads)  # type: ignore[no-untyped-call]  # torch's own

    def product(
        self,
        inputs: Tensor,
        bias: Tensor | None,
        part: SequencePart | None,
        *,
        is_conv1d: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        """The output of the column module, with its `bias`. Call it once."""
        bias = bias if self.bias is None else self.bias
        return product(inputs, self.weight, bias, is_conv1d=is_conv1d, dtype=dtype, part=part, deferred=self.grads)


def wait_in_backward(tensor: Tensor, overlapped: OverlappedSum) -> Tensor:
    """`tensor` itself. Backward: waits for the sum."""
    return apply(_WaitForSum, tensor, overlapped)


def start_in_backward(tensor: Tensor, overlapped: OverlappedSum) -> Tensor:
    """The input of columns: `tensor` itself, or the concatenated parts of all ranks. Backward: starts the sum."""
    return apply(_StartSum, tensor, overlapped)


class _WaitForSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, overlapped: OverlappedSum) -> Tensor:
        ctx.overlapped = overlapped
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        total = ctx.overlapped.wait()
        return grad if total is None else total, None


class _StartSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, overlapped: OverlappedSum) -> Tensor:
        ctx.overlapped = overlapped
        if overlapped.dim is None:
            return tensor.view_as(tensor)
        return overlapped.line.concatenate(tensor, overlapped.dim, overlapped.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if torch.is_grad_enabled():
            return ctx.overlapped.plain(grad), None
        ctx.overlapped.start(grad)
        return None, None  # `_WaitForSum` returns the gradient


class _DeferParamGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, deferred: DeferredGrads) -> Any:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        """`given` are gradients that were not deferred: those of a backward with `create_graph`, or of another use of
        the parameters."""
        weight, bias = ctx.deferred.compute(weight=ctx.needs_input_grad[0], bias=ctx.needs_input_grad[1])
        return _total(weight, given[0]), _total(bias, given[1]), None


def _total(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
