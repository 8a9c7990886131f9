"""Lion: the sign of an interpolated momentum (arXiv:2302.06675). Elementwise, with one state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.optim.cooperative import Params, evaluated


class Lion(torch.optim.Optimizer):
    """Lion (arXiv:2302.06675) with decoupled weight decay. The paper advises a learning rate 3 to 10 times smaller than
    AdamW's, and a weight decay larger by the same factor."""

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluated(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                direction = state["exp_avg"].lerp(param.grad, 1 - beta1).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                state["exp_avg"].lerp_(param.grad, 1 - beta2)
        return loss
