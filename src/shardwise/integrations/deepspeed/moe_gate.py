"""DeepSpeed's MoE gate: assigns tokens to experts by GShard's rules (arXiv:2006.16668) with a capacity.

Arithmetic and order of random draws are those of DeepSpeed 0.19 (`moe/sharded_moe.py`), so the same generator gives the
same assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ConfigError, DataError

Tensor = torch.Tensor
_JITTER = 1e-2
POLICIES = (None, "None", "Jitter", "RSample")


class Gated(NamedTuple):
    """A gate's output."""

    experts: Tensor
    """Indices of experts, int64 `[tokens, k]`; `num_experts` for dropped choices."""
    weights: Tensor
    """fp32 `[tokens, k]`; 0 for dropped choices."""
    l_aux: Tensor
    """The load-balancing loss, a scalar."""
    exp_counts: Tensor
    """How often each expert was chosen, including dropped choices, `[num_experts]`."""


@dataclass(frozen=True)
class Rules:
    """A gate's options, named like DeepSpeed's arguments."""

    num_experts: int
    k: int
    capacity_factor: float
    eval_capacity_factor: float
    min_capacity: int
    noisy_gate_policy: str | None
    drop_tokens: bool
    use_rts: bool
    top2_2nd_expert_sampling: bool

    def capacity(self, num_tokens: int, is_training: bool) -> int:
        """The most tokens of this rank that an expert accepts; all of them if none is dropped."""
        if not self.drop_tokens:
            return num_tokens
        factor = torch.tensor(
            (self.capacity_factor if is_training else self.eval_capacity_factor) * self.k, device="cpu"
        )
        even = torch.ceil((num_tokens / self.num_experts) * factor)
        return max(int(even), self.min_capacity)


class TopKGate(nn.Module):
    """A linear layer `wg` in fp32, without a bias, and the choice of experts by its logits."""

    def __init__(self, model_dim: int, rules: Rules) -> None:
        super().__init__()
        if not 1 <= rules.k <= rules.num_experts:
            raise ConfigError(f"k is {rules.k}; with {rules.num_experts} experts it must be 1 to {rules.num_experts}.")
        if rules.noisy_gate_policy not in POLICIES:
            raise ConfigError(
                f"noisy_gate_policy is {rules.noisy_gate_policy!r}; it must be None, 'Jitter' or 'RSample'."
            )
        self.wg = nn.Linear(model_dim, rules.num_experts, bias=False)
        self.rules = rules

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Gated:
        """`tokens` is `[tokens, model_dim]`; `used_token`, for k = 1, is a mask of the tokens that count."""
        rules = self.rules
        if used_token is not None and rules.k != 1:
            raise ConfigError(f"used_token needs k = 1, but k is {rules.k}. Leave it out, and mask the output.")
        if tokens.shape[0] < rules.min_capacity and rules.k == 1:
            raise DataError(
                f"There are {tokens.shape[0]} tokens, fewer than min_capacity {rules.min_capacity}. Create the layer "
                f"with min_capacity=0, or give it more tokens."
            )
        with torch.autocast(tokens.device.type, enabled=False):
            wide = tokens.float()
            if rules.noisy_gate_policy == "Jitter" and self.training:
                low, high = 1.0 - _JITTER, 1.0 + _JITTER
                wide = wide * torch.distributions.Uniform(wide.new_tensor(low), wide.new_tensor(high)).rsample(
                    wide.shape
                )
            logits = functional.linear(wide, self.wg.weight.float())
        capacity = rules.capacity(tokens.shape[0], self.training)
        if rules.k == 1:
            return _top1(logits, rules, capacity, used_token, self.training)
        return _top2(logits, rules, capacity) if rules.k == 2 else _topk(logits, rules, capacity)


def _gumbel(like: Tensor) -> Tensor:
    zero, one = like.new_tensor(0.0), like.new_tensor(1.0)
    drawn: Tensor = torch.distributions.Gumbel(zero, one).rsample(like.shape)
    return drawn


def _top1(logits: Tensor, rules: Rules, capacity: int, used: Tensor | None, is_training: bool) -> Gated:
    noisy = logits
    if rules.noisy_gate_policy == "RSample" and is_training:
        noisy = logits + _gumbel(logits)
    gates = logits.softmax(dim=1)
    chosen = (noisy if noisy is not logits else gates).argmax(dim=1)
    mask = functional.one_hot(chosen, rules.num_experts)
    if used is not None:
        mask = used.reshape(-1, 1) * mask
    counts = mask.sum(dim=0).detach()
    l_aux = (gates.mean(dim=0) * mask.float().mean(dim=0)).sum() * rules.num_experts
    ranked = mask * torch.rand(mask.shape, device=logits.device) if rules.use_rts else mask
    first = ranked.topk(min(capacity, mask.shape[0]), dim=0).indices
    mask = mask * torch.zeros_like(mask).scatter_(0, first, 1)
    kept = mask.sum(dim=1) > 0
    weights = (gates * mask).sum(dim=1, keepdim=True)
    return Gated(torch.where(kept, chosen, rules.num_experts).unsqueeze(1), weights, l_aux, counts)


def _top2(logits: Tensor, rules: Rules, capacity: int) -> Gated:
    gates = logits.softmax(dim=1)
    first = gates.argmax(dim=1)
    mask1 = functional.one_hot(first, rules.num_experts)
    noisy = logits + _gumbel(logits) if rules.top2_2nd_expert_sampling else logits
    second = noisy.masked_fill(mask1.bool(), float("-inf")).argmax(dim=1)
    mask2 = functional.one_hot(second, rules.num_experts)
    counts = (mask1 + mask2).sum(dim=0).detach()
    l_aux = (gates.mean(dim=0) * mask1.float().mean(dim=0)).mean() * rules.num_experts**2
    if rules.drop_tokens:  # first choices have priority over second ones, and earlier tokens over later ones
        location1 = mask1.cumsum(dim=0) - 1
        location2 = mask2.cumsum(dim=0) - 1 + mask1.sum(dim=0, keepdim=True)
        mask1, mask2 = mask1 * (location1 < capacity), mask2 * (location2 < capacity)
    weights = torch.stack([(gates * mask1).sum(dim=1), (gates * mask2).sum(dim=1)], dim=1)
    index = torch.stack([first, second], dim=1)
    kept = torch.stack([mask1.any(dim=1), mask2.any(dim=1)], dim=1)
    return Gated(torch.where(kept, index, rules.num_experts), _normalized(weights), l_aux, counts)


def _topk(logits: Tensor, rules: Rules, capacity: int) -> Gated:
    gates = logits.softmax(dim=1)
    best, index = gates.topk(rules.k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, index, True)
    counts = mask.sum(dim=0).detach()
    l_aux = (gates.mean(dim=0) * mask.float().mean(dim=0)).mean() * rules.num_experts**2 / rules.k
    if rules.drop_tokens:  # tokens with the highest gates are kept
        chosen = torch.zeros_like(gates).scatter(1, index, best)
        first = chosen.topk(min(capacity, gates.shape[0]), dim=0, sorted=False).indices
        mask = mask & torch.zeros_like(mask).scatter_(0, first, True)
    kept = mask.gather(1, index)
    return Gated(torch.where(kept, index, rules.num_experts), _normalized(best * kept), l_aux, counts)


def _normalized(weights: Tensor) -> Tensor:
    """The weights of each token add up to 1, unless all of its choices were dropped."""
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
