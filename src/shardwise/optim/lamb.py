"""LAMB: Adam's direction, scaled for each parameter by the ratio of two norms (arXiv:1904.00962, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.optim.cooperative import Cooperative, Params, evaluated, on_device
from shardwise.program import States, Update

Tensor = torch.Tensor


class Lamb(Cooperative):
    """LAMB for large batches (arXiv:1904.00962). On a sharded model, the norms of all parameters are summed in one
    small message per step.

    A group with `adapt=False` is updated without the ratio, as is common for biases and norms. Weight decay is part of
    the direction, as in the paper. `ratio_bounds` are the smallest and the largest ratio that is used.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adapt: bool = True,
        ratio_bounds: tuple[float, float] | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adapt": adapt, "ratio_bounds": ratio_bounds})

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:  # noqa: ARG002
        return Update(States(copies=2), needs_norm=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. The direction is computed twice, for its norm and for the update, so that it need not be
        stored."""
        loss = evaluated(closure)
        members = list(self.members())
        params = [param for _, param, _ in members]
        squares = torch.zeros(len(params), 2, device=params[0].device)
        for number, param, group in members:
            if param.grad is not None:
                self._follow(param, group)
                squares[number, 0] = param.float().square().sum()
                squares[number, 1] = self._direction(param, group).float().square().sum()
        ratios = trust_ratios(self.peers.sum_squares(params, squares))
        for number, param, group in members:
            if param.grad is not None:
                ratio = on_device(_bounded(ratios[number], group), param.device) if group["adapt"] else 1.0
                param.sub_(self._direction(param, group).mul_(group["lr"] * ratio))
        return loss

    def _follow(self, param: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Update the moments."""
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)

    def _direction(self, param: nn.Parameter, group: Mapping[str, Any]) -> Tensor:
        state, (beta1, beta2) = self.state[param], group["betas"]
        step = int(state["step"])  # on the host
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction: Tensor = (state["exp_avg"] / (1 - beta1**step)).div_(root)
        return direction.add_(param, alpha=group["weight_decay"])


def _bounded(ratio: Tensor, group: Mapping[str, Any]) -> Tensor:
    bounds = group.get("ratio_bounds")
    return ratio if bounds is None else ratio.clamp(*bounds)


def trust_ratios(squares: Tensor) -> Tensor:
    """The scale of each update, from the squared norms of parameter and direction (one row each); 1 where either is
    zero."""
    param, direction = squares.unbind(1)
    return torch.where((param > 0) & (direction > 0), (param / direction.clamp_min(1e-38)).sqrt(), 1.0)
