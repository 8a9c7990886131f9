"""Layers of experts for your own models. They work in a single process and do not know about ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.experts.assignment import assign, capacity_of, dropped_over, require_rows
from shardwise.parallel.experts.products import grouped_linear
from shardwise.parallel.experts.router import Router
from shardwise.runtime import decided

Tensor = torch.Tensor
Activation = Literal["silu", "gelu"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "gelu": functional.gelu}


class Experts(nn.Module):
    """`num_experts` MLPs without biases, with stacked weights.

    Each is gated (`activation(gate x) * up x`, arXiv:2002.05202) or not, followed by `down`. `gate_up_proj` is
    `[num_experts, 2 * intermediate_size, hidden_size]` (if not gated, `up_proj` `[num_experts, intermediate_size,
    hidden_size]`), and `down_proj` `[num_experts, hidden_size, intermediate_size]`, the layout of transformers. Raises
    `ModelError` for an unknown activation or sizes below 1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        activation: Activation = "silu",
        gated: bool = True,
    ) -> None:
        super().__init__()
        if activation not in get_args(Activation):
            raise ModelError(f"activation is {activation!r}; it is one of {', '.join(get_args(Activation))}.")
        if min(hidden_size, intermediate_size, num_experts) < 1:
            raise ModelError(
                f"Experts need sizes of at least 1, not hidden_size {hidden_size}, intermediate_size "
                f"{intermediate_size} and num_experts {num_experts}."
            )
        self.num_experts = num_experts
        self.activation = activation
        self.gated = gated
        self.capacity_factor: float | None = None
        """If set, `top_k_index` may contain `num_experts` for a dropped choice: see `MoE`."""
        first = nn.Parameter(torch.empty(num_experts, intermediate_size * (2 if gated else 1), hidden_size))
        self.register_parameter("gate_up_proj" if gated else "up_proj", first)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.reset_parameters()

    @classmethod
    def stacked(
        cls,
        experts: Sequence[nn.Module],
        *,
        up: str,
        down: str,
        gate: str | None = None,
        activation: Activation = "silu",
    ) -> Experts:
        """Copies the weights of single experts, such as those in an `nn.ModuleList`, in their order.

        `gate`, `up` and `down` are the names of their linear layers: an expert computes `down(activation(gate x) * up
        x)`, or `down(activation(up x))` without `gate`. Raises `ModelError` if an expert has other parameters.
        """
        names = [f"{name}.weight" for name in (gate, up, down) if name is not None]
        weights: dict[str, list[Tensor]] = {name: [] for name in names}
        for number, expert in enumerate(experts):
            params = dict(expert.named_parameters())
            if sorted(params) != sorted(names):
                raise ModelError(
                    f"Expert {number} has the parameters {', '.join(params) or 'none'}, but experts to be stacked have "
                    f"{', '.join(names)}: linear layers without biases, whose names are arguments."
                )
            for name in names:
                weights[name].append(params[name].detach())
        if not experts or any(len({one.shape for one in every}) > 1 for every in weights.values()):
            raise ModelError(f"{len(experts)} experts cannot be stacked: give at least one, all of the same sizes.")
        *first, last = (torch.stack(every) for every in weights.values())
        if any(one.mT.shape != last.shape for one in first):
            shown = " and ".join(str(list(every[0].shape)) for every in weights.values())
            raise ModelError(
                f"Experts with matrices of {shown} cannot be stacked: {down} must lead back from the intermediate size "
                f"to the hidden size."
            )
        _, hidden_size, intermediate_size = last.shape
        with torch.device("meta"):
            made = cls(hidden_size, intermediate_size, len(experts), activation=activation, gated=gate is not None)
        made.register_parameter("up_proj" if gate is None else "gate_up_proj", nn.Parameter(torch.cat(first, dim=1)))
        made.down_proj = nn.Parameter(last)
        return made

    def reset_parameters(self) -> None:
        """Initialize each matrix as `nn.Linear` does."""
        for param in self.parameters():
            bound = 1 / math.sqrt(param.shape[2])
            nn.init.uniform_(param, -bound, bound)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None = None) -> Tensor:
        """For each token of `hidden_states` `[tokens, hidden_size]` the weighted sum of the outputs of its experts, of
        the same shape.

        `top_k_index` (int64, expert numbers) and `top_k_weights` (`None`: all 1) are `[tokens, top_k]`. With experts
        split along `ep`, all ranks of the axis must call.
        """
        require_rows(top_k_index)
        num_tokens, top_k = top_k_index.shape
        assignment = assign(
            decided(lambda: top_k_index), self.num_experts, self.capacity(num_tokens, top_k, self.num_experts)
        )
        made = self.made_of(assignment.rows(hidden_states), assignment.counts)
        return assignment.combine(made, top_k_weights)

    def capacity(self, num_tokens: int, top_k: int, num_experts: int) -> int | None:
        """The most choices of `num_tokens` tokens that one of `num_experts` experts accepts; `None` if nothing is
        dropped."""
        factor = self.capacity_factor
        return None if factor is None else capacity_of(num_tokens, top_k, num_experts, factor)

    def made_of(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs for `rows` ordered by expert, `counts` of each."""
        first, last = self.get_parameter("gate_up_proj" if self.gated else "up_proj"), self.down_proj
        if torch.is_autocast_enabled(rows.device.type):
            dtype = torch.get_autocast_dtype(rows.device.type)
            rows, first, last = rows.to(dtype), first.to(dtype), last.to(dtype)  # type: ignore[assignment]
        inner = self.multiply(rows, first, counts)
        activate = _ACTIVATIONS[self.activation]
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = activate(gate) * up
        else:
            inner = activate(inner)
        return self.multiply(inner, last, counts)

    def multiply(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Each row times the matrix of its expert, `weights` `[experts, out, in]`."""
        return grouped_linear(rows, weights, counts)

    def extra_repr(self) -> str:
        kind = f"gated {self.activation}" if self.gated else self.activation
        return f"{self.num_experts} x {kind}, {self.down_proj.shape[1]} -> {self.down_proj.shape[2]}"


class MoE(nn.Module):
    """A mixture of experts that replaces an MLP (arXiv:1701.06538): `router`, `experts`, and `shared`, an expert for
    all tokens whose output is added, if `shared_size` (its intermediate size) is given.

    Without `capacity_factor` no token is dropped. With one, an expert accepts at most `ceil(capacity_factor * tokens *
    top_k / num_experts)` of the tokens of a rank's forward, in training and in evaluation: first choices before second
    ones, then by position. A dropped choice adds nothing. Other arguments are those of `Router`. Under an engine whose
    mesh has the axis `ep` each rank keeps some of the experts, and all ranks of the axis must call the forward: see
    docs/experts.md.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: Activation = "silu",
        gated: bool = True,
        shared_size: int = 0,
        capacity_factor: float | None = None,
        **router: Any,
    ) -> None:
        """Raises `ModelError` for invalid sizes."""
        super().__init__()
        if capacity_factor is not None and not capacity_factor > 0:
            raise ModelError(f"capacity_factor is {capacity_factor}; give a positive one, or None to drop no token.")
        self.router = Router(hidden_size, num_experts, top_k, **router)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, activation=activation, gated=gated)
        self.experts.capacity_factor = capacity_factor
        self.shared = Mlp(hidden_size, shared_size, activation=activation, gated=gated) if shared_size else None

    @property
    def capacity_factor(self) -> float | None:
        return self.experts.capacity_factor

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden` is `[..., hidden_size]`; so is the output."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        index, weights = self.router(flat)
        capacity = self.experts.capacity(flat.shape[0], self.router.top_k, self.router.num_experts)
        if capacity is not None:
            index = dropped_over(index, self.router.num_experts, capacity)
        out: Tensor = self.experts(flat, index, weights)
        if self.shared is not None:
            out = out + self.shared(flat)
        return out.view(*hidden.shape[:-1], out.shape[-1])


class Mlp(nn.Module):
    """One expert, made of linear layers without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, activation: Activation, gated: bool) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False) if gated else None
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        activate = _ACTIVATIONS[self.activation]
        up = self.up_proj(hidden)
        out: Tensor = self.down_proj(activate(up) if self.gate_proj is None else activate(self.gate_proj(hidden)) * up)
        return out
