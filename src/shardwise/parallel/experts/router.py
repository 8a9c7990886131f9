"""Which experts each token goes to, and how their load is balanced."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.experts.assignment import num_per_expert
from shardwise.runtime import in_backward

Tensor = torch.Tensor
Scores = Literal["softmax", "sigmoid"]
Total = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks that have different tokens."""


class Routing(NamedTuple):
    """Per token, the numbers of its experts, int64 `[tokens, top_k]`, and their weights, of the same shape, at least
    fp32."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Scores experts for each token, in at least fp32, and selects the best `top_k`.

    `scores`: `softmax` over the experts (arXiv:1701.06538, 2101.03961), or a `sigmoid` for each (DeepSeek-V3,
    arXiv:2412.19437). With `normalize` the weights of a token's experts add up to 1; they are multiplied by `scale`.

    There are three ways to balance the load of experts, each off at 0. `balance_loss` is the factor of the loss of
    Switch and GShard, `num_experts * sum(fraction of choices * mean score)`, which is 1 under an even load. If the
    ranks of an engine share a batch, the fractions are those of all their tokens (arXiv:2501.11873), so that the mean
    of the ranks' losses is the loss of the whole batch. `z_loss` is the factor of the loss of ST-MoE
    (arXiv:2202.08906), the mean squared logsumexp of the logits. `auxiliary_loss(model)` returns both. `bias_rate`
    needs no loss (arXiv:2408.15664): experts are chosen by score plus a bias, a buffer, which `update_biases(model)`
    changes by this amount after each step.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        scores: Scores = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        balance_loss: float = 0.0,
        z_loss: float = 0.0,
        bias_rate: float = 0.0,
    ) -> None:
        """Raises `ModelError` for invalid arguments."""
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ModelError(
                f"top_k is {top_k}, and there are {num_experts} experts. Choose a top_k from 1 to {num_experts}."
            )
        if scores not in get_args(Scores):
            raise ModelError(f"scores is {scores!r}; it is one of {', '.join(get_args(Scores))}.")
        self.num_experts = num_experts
        self.top_k = top_k
        self.scores = scores
        self.normalize = normalize
        self.scale = scale
        self.balance_loss = balance_loss
        self.z_loss = z_loss
        self.bias_rate = bias_rate
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(num_experts) if bias_rate else None)
        self.loss: Tensor | None = None
        """The loss of the last training forward, until `auxiliary_loss` takes it."""
        self.load: Tensor | None = None
        """Choices per expert, int64 `[num_experts]`, on this rank in training since the last `update_biases`, or since
        the last step that has added them to `counts`."""
        self.counts: Tensor | None = None
        """The same on all ranks, fp32, where steps add them up; see `loads.py`."""
        self.total: Total = torch.Tensor.clone
        """Replaced by a sum over ranks if an engine's ranks share a batch."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.weight.shape[1]))

    def forward(self, hidden: Tensor) -> Routing:
        """`hidden` is `[tokens, hidden_size]`. In training this records loss and load, except when a forward is
        recomputed for its backward."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden.to(dtype), self.weight.to(dtype))
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        chosen_by = scores.detach() if self.bias is None else scores.detach() + self.bias
        index = chosen_by.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, index)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self._remember(logits, scores, index)
        return Routing(index, weights * self.scale)

    def _remember(self, logits: Tensor, scores: Tensor, index: Tensor) -> None:
        if not (self.balance_loss or self.z_loss or self.bias_rate):
            return
        load = num_per_expert(index, self.num_experts)
        loss = logits.new_zeros(())
        if self.balance_loss:
            shares = scores if self.scores == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
            counts = self.total(load.to(scores.dtype))
            fractions = counts / counts.sum().clamp(min=1)
            mean = shares.sum(0) / max(1, shares.shape[0])
            loss = loss + self.balance_loss * self.num_experts * (fractions * mean).sum()
        if self.z_loss:
            loss = loss + self.z_loss * logits.logsumexp(-1).square().sum() / max(1, logits.shape[0])
        if in_backward():
            return
        self.loss = loss if self.balance_loss or self.z_loss else None
        if self.bias_rate:
            self.load = load if self.load is None else self.load + load


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers in `model`, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def auxiliary_loss(model: nn.Module) -> Tensor:
    """The balance and z losses of all routers in `model` in its last forward, to be added to its loss.

    A scalar in at least fp32; zero if no router has such a loss. Each loss is returned once and then cleared. Every
    rank calls it for its own batch, after the forward. Raises `ModelError` if a router's forward ran without gradients,
    as blocks do under reentrant checkpointing.
    """
    losses = []
    for name, router in routers_of(model).items():
        loss, router.loss = router.loss, None
        if loss is None:
            continue
        if torch.is_grad_enabled() and router.weight.requires_grad and not loss.requires_grad:
            raise ModelError(
                f"{name or 'The router'} computed its loss without gradients. Recompute its block with "
                f"torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
            )
        losses.append(loss)
    if losses:
        return torch.stack(losses).sum()
    first = next(model.parameters(), None)
    return torch.zeros((), device=None if first is None else first.device)


@torch.no_grad()
def update_biases(model: nn.Module) -> None:
    """Move the bias of each router of `model` that has one: up for experts that got fewer tokens than the mean since
    the last call, down for those that got more. All ranks must call it, after each step (arXiv:2408.15664)."""
    for router in routers_of(model).values():
        if router.bias is not None:
            move_bias(router)


@torch.no_grad()
def move_bias(router: Router) -> None:
    """`update_biases` of one router, which has a bias."""
    assert router.bias is not None
    if router.counts is None:
        counts = router.total(take_load(router))
    else:
        counts, router.counts = router.counts, torch.zeros_like(router.counts)
    router.bias += router.bias_rate * torch.sign(counts.mean() - counts)


def take_load(router: Router) -> Tensor:
    """What `router` has counted on this rank, in fp32. It counts anew."""
    load, router.load = router.load, None
    if load is None:
        return torch.zeros(router.num_experts, device=router.weight.device)
    return load.to(torch.float32)


def check_routers(model: nn.Module, *, in_stages: bool, is_compiled: bool) -> None:
    """Raise `ModelError` for routers whose losses or loads would be wrong: in a pipeline, where the last stage would
    add only the losses of its own routers, and in compiled modules, whose forward cannot record anything beside its
    output."""
    for name, router in routers_of(model).items():
        has_loss = bool(router.balance_loss or router.z_loss)
        if in_stages and has_loss:
            raise ModelError(
                f"{name} has a balance_loss or z_loss, which the last stage of a pipeline would have to add, and it "
                f"has only its own routers. Balance with bias_rate instead, or leave pp out of the mesh."
            )
        if is_compiled and (has_loss or router.bias_rate):
            raise ModelError(
                f"{name} has a balance_loss, z_loss or bias_rate, for which a forward records more than its "
                f"output, and a compiled one cannot. Leave out compile, or set them to 0."
            )
