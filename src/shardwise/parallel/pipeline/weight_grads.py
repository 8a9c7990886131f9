"""Deferred gradients of weights: the second half of a backward in the zero-bubble schedule.

[Note: two halves] A stage sends the gradient of its input back as soon as it can, and computes the gradients of its
weights, for which no other rank waits, in time that would otherwise be idle (Qi et al., arXiv:2401.10241). Here this
covers `nn.Linear`, which is most of the work: in the first half a linear layer computes the gradient of its input and
keeps what the gradient of its weight needs; the second half is a separate backward, in which these gradients reach the
parameters as any others do. Everything else (norms, embeddings, layers of other classes) is computed in the first half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

Tensor = torch.Tensor


class Aside(NamedTuple):
    """The tensors from which the gradients of one layer's parameters are computed."""

    layer: nn.Linear
    inputs: Tensor
    gradient: Tensor


class WeightGrads:
    """The linear layers of some modules. Between `attach` and `release` their backwards can defer weight gradients."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        inner = dict.fromkeys(one for module in modules for one in module.modules())
        self.layers = [one for one in inner if type(one) is nn.Linear and _is_plain(one)]
        self._aside: list[Aside] | None = None

    @property
    def params(self) -> set[nn.Parameter]:
        """The parameters whose gradients are deferred."""
        return {param for layer in self.layers if layer.weight.requires_grad for param in layer.parameters()}

    def attach(self) -> None:
        for layer in self.layers:
            layer.__dict__["forward"] = _Forward(self, layer)

    def release(self) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)

    @contextmanager
    def put_aside(self) -> Iterator[list[Aside]]:
        """A context in which a backward is a first half; the list receives its deferred gradients."""
        self._aside = []
        try:
            yield self._aside
        finally:
            self._aside = None

    def keep(self, layer: nn.Linear, inputs: Tensor, gradient: Tensor) -> bool:
        """Record the gradients of `layer` for later if a first half is running; returns whether it did."""
        if self._aside is None:
            return False
        self._aside.append(Aside(layer, inputs.detach(), gradient.detach()))
        return True


def backward_of_weights(aside: Sequence[Aside]) -> None:
    """Run the second half. The caller drops the list afterwards."""
    if not aside:
        return
    make: Callable[..., Tensor] = _Weights.apply
    torch.autograd.backward([make(one, one.layer.weight, one.layer.bias) for one in aside])


def _is_plain(layer: nn.Linear) -> bool:
    """Whether nobody but us has replaced its forward."""
    return isinstance(layer.__dict__.get("forward"), _Forward | None)


class _Forward:
    """Replaces the forward of one linear layer."""

    def __init__(self, owner: WeightGrads, layer: nn.Linear) -> None:
        self.owner, self.layer = owner, layer

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        if not (torch.is_grad_enabled() and layer.weight.requires_grad):
            return nn.functional.linear(x, layer.weight, layer.bias)
        compute: Callable[..., Tensor] = _Linear.apply
        return compute(x, layer.weight, layer.bias, self)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of: _Forward) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of = of
        of_bias = None if bias is None else bias.detach()
        with torch.enable_grad():  # of nothing here, but where gradients are disabled no result is kept (`_is_kept`)
            made = nn.functional.linear(x.detach(), weight.detach(), of_bias)
        return made.detach()  # a view of rows may not be changed in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_input = gradient @ weight if ctx.needs_input_grad[0] else None
        if ctx.of.owner.keep(ctx.of.layer, x, gradient):
            return of_input, None, None, None
        has_bias = ctx.of.layer.bias is not None and ctx.needs_input_grad[2]
        return of_input, _of_weight(x, gradient), _of_bias(gradient) if has_bias else None, None


class _Weights(torch.autograd.Function):
    """An autograd node without a computation, whose backward produces the gradients of a layer's parameters."""

    @staticmethod
    def forward(ctx: Any, one: Aside, weight: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.one = one
        return one.gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        _, x, gradient = ctx.one
        return None, _of_weight(x, gradient), _of_bias(gradient) if ctx.needs_input_grad[2] else None


def _of_weight(x: Tensor, gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def _of_bias(gradient: Tensor) -> Tensor:
    return gradient.reshape(-1, gradient.shape[-1]).sum(0)
