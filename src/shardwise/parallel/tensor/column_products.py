"""Matrix products of column modules with a backward that saves less, or can defer parameter gradients.

[Note: gathered again] With `tensor.sequence` the columns of a region read the whole sequence, of which every rank has
a part. Only the part is saved for the backward. The whole is gathered again in the backward of the first column, and
freed after the last (Megatron-LM's sequence parallelism, arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shardwise.comm import Line, Started
from shardwise.errors import CommError
from shardwise.memory import is_at_rest
from shardwise.parallel.tensor.functions import apply, gather_to

Tensor = torch.Tensor
Grads = tuple[Tensor | None, Tensor | None]
"""The gradients of a weight and a bias."""


class DeferredGrads:
    """Parameter gradients that the backward of a column has postponed: see [Note: overlapped sums]."""

    __slots__ = ("_make",)

    def __init__(self) -> None:
        self._make: Callable[[bool, bool], Grads] | None = None

    def defer(self, make: Callable[[bool, bool], Grads]) -> None:
        """`make` is called with whether the gradients of the weight and of the bias are needed."""
        self._make = make

    def compute(self, *, weight: bool, bias: bool) -> Grads:
        """The gradients of the weight and the bias; `None` if one is not needed, or was not deferred."""
        make, self._make = self._make, None
        return (None, None) if make is None else make(weight, bias)


class PendingCollective:
    """A collective that overlaps computation. It can be reused, but runs only once at a time."""

    def __init__(self, pending: set[PendingCollective]) -> None:
        """It is a member of the set `pending` while it runs."""
        self._pending = pending
        self._started: Started | None = None

    @property
    def is_started(self) -> bool:
        return self._started is not None

    def start(self, started: Started) -> None:
        self._pending.add(self)
        self._started = started

    def wait(self) -> Tensor | None:
        """The result, or `None` if none was started."""
        started, self._started = self._started, None
        self._pending.discard(self)
        return None if started is None else started.wait()

    def discard(self) -> None:
        """Wait, without a result, because the backward that would have waited has failed."""
        with suppress(CommError):  # it has been raised already
            self.wait()


class RegatheredInput:
    """The input of the columns of one region, which each backward gathers again from the ranks' parts."""

    def __init__(self, line: Line, dim: int, sizes: Sequence[int], pending: set[PendingCollective]) -> None:
        """`sizes` are the sizes of the ranks' parts along `dim`."""
        self._line = line
        self._args = dim, tuple(sizes)
        self._pending = PendingCollective(pending)
        self._num_columns = 0
        self._num_waiting = 0
        self._whole: Tensor | None = None

    def count_column(self) -> None:
        """Register one more column that will call `take` once in a backward."""
        self._num_columns += 1

    def begin(self, own: Tensor, dtype: torch.dtype | None) -> None:
        """Start to gather `own`, if that can overlap the computation before `take`."""
        is_begun = self._whole is not None or self._pending.is_started
        if self._line.overlaps_compute and not is_begun and not torch.is_grad_enabled():
            self._pending.start(self._line.start_concatenate(_cast(own, dtype), *self._args))

    def take(self, own: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The whole input, given the saved part `own`; in `dtype` if one is given."""
        if torch.is_grad_enabled():
            return gather_to(_cast(own, dtype), self._line, *self._args)
        if self._whole is None:
            begun = self._pending.wait()
            self._whole = self._line.concatenate(_cast(own, dtype), *self._args) if begun is None else begun
            self._num_waiting = self._num_columns
        whole = self._whole
        self._num_waiting -= 1
        if not self._num_waiting:
            self._whole = None
        return whole


class SequencePart(NamedTuple):
    """This rank's part of the input of columns, and the whole, which can be gathered again."""

    own: Tensor
    whole: RegatheredInput


class _Options(NamedTuple):
    is_conv1d: bool
    dtype: torch.dtype | None
    whole: RegatheredInput | None
    deferred: DeferredGrads | None


def product(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_conv1d: bool,
    dtype: torch.dtype | None = None,
    part: SequencePart | None = None,
    deferred: DeferredGrads | None = None,
) -> Tensor:
    """`inputs @ weight.T + bias`, without transposing for a Conv1D; in autocast's `dtype`, if one is given.

    If a `part` of `inputs` is given, it is saved instead of them. If `deferred` is given, it computes the gradients of
    `weight` and `bias`, and the backward does not.
    """
    own, whole = (None, None) if part is None else part
    if whole is not None:
        whole.count_column()
    return apply(_Product, _cast(inputs, dtype), own, weight, bias, _Options(is_conv1d, dtype, whole, deferred))


def has_own_backward(weight: Tensor) -> bool:
    """Whether `product` can be used with `weight`."""
    return (
        torch.is_grad_enabled()
        and not (isinstance(weight, nn.Parameter) and is_at_rest(weight))
        and weight.requires_grad
        and not torch.compiler.is_compiling()
    )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes a product with `tensor`; `None` if it does not apply."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:  # autocast ignores float64
        return None
    return torch.get_autocast_dtype(kind)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, own: Tensor | None, weight: Tensor, bias: Tensor | None, options: _Options
    ) -> Tensor:
        used = _cast(weight, options.dtype)
        # Autocast's copy of the weight is saved, as torch does. A backward with `create_graph` casts again.
        ctx.save_for_backward(inputs if own is None else own, weight, None if used is weight else used)
        ctx.options, ctx.bias_dtype = options, None if bias is None else bias.dtype
        made = functional.linear(
            inputs, used.t() if options.is_conv1d else used, None if bias is None else _cast(bias, options.dtype)
        )
        return made.detach()  # a view of rows may not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, weight, used = ctx.saved_tensors
        options: _Options = ctx.options
        if used is None or torch.is_grad_enabled():
            used = _cast(weight, options.dtype)
        needs_weight = ctx.needs_input_grad[2]
        if options.whole is not None and needs_weight:
            options.whole.begin(saved, options.dtype)
        input_grad = _input_grad(used, grad, is_conv1d=options.is_conv1d) if ctx.needs_input_grad[0] else None
        take = partial(_inputs, saved, options)
        make = partial(_param_grads, take, grad, is_conv1d=options.is_conv1d, dtypes=(weight.dtype, ctx.bias_dtype))
        if options.deferred is None or torch.is_grad_enabled():
            weight_grad, bias_grad = make(needs_weight, ctx.needs_input_grad[3])
            return input_grad, None, weight_grad, bias_grad, None
        options.deferred.defer(make)
        # A bias that does not go through `_DeferParamGrads` with its weight needs no gradient.
        return input_grad, None, None, None, None


def _inputs(saved: Tensor, options: _Options) -> Tensor:
    return saved if options.whole is None else options.whole.take(saved, options.dtype)


def _param_grads(
    take: Callable[[], Tensor],
    grad: Tensor,
    weight: bool,
    bias: bool,
    *,
    is_conv1d: bool,
    dtypes: tuple[torch.dtype, torch.dtype | None],
) -> Grads:
    """The gradients of the weight and the bias in their `dtypes`; `weight` and `bias` say which are needed."""
    weight_grad = _weight_grad(take(), grad, is_conv1d=is_conv1d).to(dtypes[0]) if weight else None
    return weight_grad, grad.flatten(0, -2).sum(0).to(dtypes[1]) if bias else None


def _input_grad(weight: Tensor, grad: Tensor, *, is_conv1d: bool) -> Tensor:
    return grad @ (weight.t() if is_conv1d else weight)


def _weight_grad(inputs: Tensor, grad: Tensor, *, is_conv1d: bool) -> Tensor:
    rows, sums = inputs.flatten(0, -2), grad.flatten(0, -2)
    return rows.t() @ sums if is_conv1d else sums.t() @ rows


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
