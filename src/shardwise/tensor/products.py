"""Products of column modules whose backwards do less at once, or hold less, than torch's own.

[Note: gathered again] With `tensor.sequence` the columns of a region read the whole sequence, of which every rank has
its part. Saved for the backward is the part alone: the whole is gathered again when the first of the columns is
differentiated, and let go behind the last (Megatron-LM's sequence parallelism, arXiv:2205.05198, section 4.2.2).
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
from shardwise.storage import is_at_rest
from shardwise.tensor.functions import apply, gather_to

Tensor = torch.Tensor
Grads = tuple[Tensor | None, Tensor | None]
"""Of a weight and a bias."""


class Left:
    """What the backward of a column has left for its parameters' gradients: see [Note: sums beside products]."""

    __slots__ = ("_make",)

    def __init__(self) -> None:
        self._make: Callable[[bool, bool], Grads] | None = None

    def leave(self, make: Callable[[bool, bool], Grads]) -> None:
        """`make` is called with whether the gradient of the weight is asked for, and that of the bias."""
        self._make = make

    def grads(self, *, weight: bool, bias: bool) -> Grads:
        """Of the weight and the bias; `None` of what is not asked for, and if nothing was left."""
        make, self._make = self._make, None
        return (None, None) if make is None else make(weight, bias)


class UnderWay:
    """A collective that runs beside computation; it may be started again and again, never twice at a time."""

    def __init__(self, every: set[UnderWay]) -> None:
        """In `every` while it is under way."""
        self._every = every
        self._started: Started | None = None

    @property
    def is_started(self) -> bool:
        return self._started is not None

    def start(self, started: Started) -> None:
        self._every.add(self)
        self._started = started

    def wait(self) -> Tensor | None:
        """What it came to; `None` if none was started."""
        started, self._started = self._started, None
        self._every.discard(self)
        return None if started is None else started.wait()

    def give_up(self) -> None:
        """The backward has failed that would have waited."""
        with suppress(CommError):  # it has been complained about already
            self.wait()


class GatheredAgain:
    """What the columns of one region read, gathered from the ranks' parts whenever a backward wants it."""

    def __init__(self, line: Line, dim: int, sizes: Sequence[int], under_way: set[UnderWay]) -> None:
        """`sizes` are those of the ranks' parts along `dim`."""
        self._line = line
        self._args = dim, tuple(sizes)
        self._under_way = UnderWay(under_way)
        self._num_columns = 0
        self._num_waiting = 0
        self._whole: Tensor | None = None

    def count_column(self) -> None:
        """One more column reads it, and takes it once in a backward."""
        self._num_columns += 1

    def begin(self, own: Tensor, dtype: torch.dtype | None) -> None:
        """Something is computed before the whole of `own` is taken: gather it meanwhile, where that runs beside."""
        is_begun = self._whole is not None or self._under_way.is_started
        if self._line.runs_beside and not is_begun and not torch.is_grad_enabled():
            self._under_way.start(self._line.start_concatenate(_cast(own, dtype), *self._args))

    def take(self, own: Tensor, dtype: torch.dtype | None) -> Tensor:
        """The whole, of `own` as it was saved, in `dtype` if one is given."""
        if torch.is_grad_enabled():
            return gather_to(_cast(own, dtype), self._line, *self._args)
        if self._whole is None:
            begun = self._under_way.wait()
            self._whole = self._line.concatenate(_cast(own, dtype), *self._args) if begun is None else begun
            self._num_waiting = self._num_columns
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
    dtype: torch.dtype | None
    again: GatheredAgain | None
    left: Left | None


def product(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_conv1d: bool,
    dtype: torch.dtype | None = None,
    part: Part | None = None,
    left: Left | None = None,
) -> Tensor:
    """`inputs @ weight.T + bias`, without transposing for a Conv1D; in autocast's `dtype`, if one is given.

    A `part` of `inputs` is saved in their place; with `left` the gradients of `weight` and `bias` are left to whoever
    asks it.
    """
    own, again = (None, None) if part is None else part
    if again is not None:
        again.count_column()
    return apply(_Product, _cast(inputs, dtype), own, weight, bias, _How(is_conv1d, dtype, again, left))


def has_own_backward(weight: Tensor) -> bool:
    """Whether a product with `weight` can be one of these."""
    return (
        torch.is_grad_enabled()
        and not (isinstance(weight, nn.Parameter) and is_at_rest(weight))
        and weight.requires_grad
        and not torch.compiler.is_compiling()
    )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """What autocast has a product with `tensor` computed in, if it is on and not for naught."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:  # which it leaves alone
        return None
    return torch.get_autocast_dtype(kind)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, own: Tensor | None, weight: Tensor, bias: Tensor | None, how: _How) -> Tensor:
        used = _cast(weight, how.dtype)
        # Autocast's copy of the weight is saved, as torch does; for a graph of a backward it is made again.
        ctx.save_for_backward(inputs if own is None else own, weight, None if used is weight else used)
        ctx.how, ctx.of_bias = how, None if bias is None else bias.dtype
        return functional.linear(
            inputs, used.t() if how.is_conv1d else used, None if bias is None else _cast(bias, how.dtype)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved, weight, used = ctx.saved_tensors
        how: _How = ctx.how
        if used is None or torch.is_grad_enabled():
            used = _cast(weight, how.dtype)
        is_wanted = ctx.needs_input_grad[2]
        if how.again is not None and is_wanted:
            how.again.begin(saved, how.dtype)
        of_input = _of_input(used, grad, is_conv1d=how.is_conv1d) if ctx.needs_input_grad[0] else None
        take = partial(_inputs, saved, how)
        make = partial(_of_params, take, grad, is_conv1d=how.is_conv1d, dtypes=(weight.dtype, ctx.of_bias))
        if how.left is None or torch.is_grad_enabled():
            of_weight, of_bias = make(is_wanted, ctx.needs_input_grad[3])
            return of_input, None, of_weight, of_bias, None
        how.left.leave(make)
        # What `_Later` has no part in: a bias whose weight alone goes through it has no gradient.
        return of_input, None, None, None, None


def _inputs(saved: Tensor, how: _How) -> Tensor:
    return saved if how.again is None else how.again.take(saved, how.dtype)


def _of_params(
    take: Callable[[], Tensor],
    grad: Tensor,
    weight: bool,
    bias: bool,
    *,
    is_conv1d: bool,
    dtypes: tuple[torch.dtype, torch.dtype | None],
) -> Grads:
    """The gradients of `weight` and `bias`, as far as they are asked for, in their `dtypes`."""
    of_weight = _of_weight(take(), grad, is_conv1d=is_conv1d).to(dtypes[0]) if weight else None
    return of_weight, grad.flatten(0, -2).sum(0).to(dtypes[1]) if bias else None


def _of_input(weight: Tensor, grad: Tensor, *, is_conv1d: bool) -> Tensor:
    return grad @ (weight.t() if is_conv1d else weight)


def _of_weight(inputs: Tensor, grad: Tensor, *, is_conv1d: bool) -> Tensor:
    rows, sums = inputs.flatten(0, -2), grad.flatten(0, -2)
    return rows.t() @ sums if is_conv1d else sums.t() @ rows


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype)
