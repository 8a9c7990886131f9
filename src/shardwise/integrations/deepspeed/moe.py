"""`deepspeed.moe`: an MoE layer whose experts are copies of any module, distributed over the mesh axis `ep`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.moe_gate import Gated, Rules, TopKGate
from shardwise.parallel.experts import Experts
from shardwise.parallel.experts.assignment import is_rehearsed
from shardwise.system.even_parts import even_sizes

Tensor = torch.Tensor
_LARGEST_GROUP = 178956971


class ExpertCopies(Experts):
    """`num_experts` copies of a module that computes each row independently. Parameters are stacked: the module's
    `fc1.weight` is `fc1_weight`, `[num_experts, ...]`."""

    def __init__(self, expert: nn.Module, num_experts: int, hidden_size: int, rules: Rules) -> None:
        nn.Module.__init__(self)
        buffers = [name for name, _ in expert.named_buffers()]
        if buffers:
            raise ConfigError(
                f"The expert {type(expert).__name__} has buffers ({', '.join(buffers)}), which is not supported. Use a "
                f"module that has only parameters."
            )
        self.num_experts = num_experts
        self.hidden_dim = hidden_size
        self.capacity_factor = None
        self._rules = rules
        self._names = {name: name.replace(".", "_") for name, _ in expert.named_parameters()}
        for name, param in expert.named_parameters():
            stacked = nn.Parameter(param.detach().repeat(num_experts, *[1] * param.dim()), param.requires_grad)
            self.register_parameter(self._names[name], stacked)
        self.__dict__["_template"] = copy.deepcopy(expert).to("meta")  # only its forward is used

    def reset_parameters(self) -> None:
        """Does nothing: experts start with the parameters of the module they are copied from."""

    def capacity(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """The most tokens of this rank that an expert accepts."""
        return self._rules.capacity(num_tokens, self.training)

    def made_of(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The experts' outputs for `rows`, which are sorted by expert, with `counts` of each."""
        sizes = even_sizes(rows.shape[0], counts.shape[0]) if is_rehearsed(counts) else counts.tolist()
        stacked = {name: self.get_parameter(own).unbind(0) for name, own in self._names.items()}
        template: nn.Module = self.__dict__["_template"].train(self.training)
        made = []
        for expert, part in enumerate(rows.split_with_sizes(sizes)):
            out = functional_call(template, {name: each[expert] for name, each in stacked.items()}, (part,))
            made.append(out[0] if isinstance(out, tuple) else out)
        return torch.cat(made)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x {type(self.__dict__['_template']).__name__}"


class MOELayer(nn.Module):
    """A gate and its experts. `l_aux` and `exp_counts` are from the last forward."""

    is_in_stages = False
    """Set by `PipelineModule`, whose loss is made of what layers return: there `l_aux` is kept as a value alone."""

    def __init__(self, gate: TopKGate, experts: ExpertCopies) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None

    def forward(self, hidden: Tensor, used_token: Tensor | None = None) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        gated: Gated = self.gate(flat, used_token)
        self.l_aux, self.exp_counts = gated.l_aux, gated.exp_counts
        out: Tensor = self.experts(flat, gated.experts, gated.weights)
        return out.view(*hidden.shape[:-1], out.shape[-1])


class MoE(nn.Module):
    """DeepSpeed's MoE layer, with its arguments: `num_experts` copies of `expert`, of which each token uses `k`.

    The experts are distributed over `ep_size` ranks, each with its own batch; `initialize` adds an axis `ep` of that
    size to the mesh. The forward takes `hidden_states` `[..., hidden_size]` and returns the output, of the same shape;
    the loss `l_aux`, which the script adds to its own; and `exp_counts`, how often each expert was chosen on this rank.

    `use_tutel` has no effect. Raises `ConfigError` for unsupported options.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if num_experts % ep_size:
            raise ConfigError(f"num_experts is {num_experts}, which is not a multiple of ep_size {ep_size}.")
        if enable_expert_tensor_parallelism:
            raise ConfigError(
                "enable_expert_tensor_parallelism is not supported: each expert is whole on its rank. Use a larger "
                "ep_size."
            )
        self.num_experts = num_experts
        self.ep_size = ep_size
        self.num_local_experts = num_experts // ep_size
        self.use_residual = use_residual
        rules = Rules(
            num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy, drop_tokens,
            use_rts, top2_2nd_expert_sampling,
        )  # fmt: skip
        copies = ExpertCopies(expert, num_experts, hidden_size, rules)
        for param in copies.parameters():  # attributes of DeepSpeed's expert parameters, which scripts read
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = f"ep_size_{ep_size}"  # type: ignore[attr-defined]
        self.deepspeed_moe = MOELayer(TopKGate(hidden_size, rules), copies)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Not needed: expert parallelism follows from the mesh."""

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the output, `l_aux` and `exp_counts`."""
        layer = self.deepspeed_moe
        output, loss = layer(hidden_states, used_token), layer.l_aux
        if loss is not None and layer.is_in_stages:
            layer.l_aux = loss.detach()
        if self.use_residual:
            residual = self.mlp(hidden_states)
            residual = residual[0] if isinstance(residual, tuple) else residual
            coefficients = self.coefficient(hidden_states).softmax(dim=-1)
            output = output * coefficients[..., 0:1] + residual * coefficients[..., 1:]
        return output, loss, layer.exp_counts


def expert_ranks_of(model: nn.Module) -> int:
    """The `ep_size` of the MoE layers in `model`; 1 if it has none. Raises `ConfigError` if they differ."""
    sizes = {module.ep_size: name for name, module in model.named_modules() if isinstance(module, MoE)}
    if len(sizes) > 1:
        listed = ", ".join(f"{name} has {size}" for size, name in sizes.items())
        raise ConfigError(f"All MoE layers of a model need the same ep_size, but {listed}.")
    return next(iter(sizes), 1)


# -- deepspeed.moe.utils ------------------------------------------------------------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether `m` contains a `MoE`, and the number of experts of the first one."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def is_moe_param(param: Tensor) -> bool:
    """Whether `param` is an expert's."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters that are not experts', and those that are."""
    listed = list(params)
    return [one for one in listed if not is_moe_param(one)], [one for one in listed if is_moe_param(one)]


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = _LARGEST_GROUP,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, with experts in separate groups (`moe: True`) after the others.

    As in DeepSpeed, a group of experts has at most `max_group_size` elements. shardwise does not need this, and results
    are the same.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    added = []
    for group in groups:
        shared, expert = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        for name in dict.fromkeys(str(param.group_name) for param in expert):  # type: ignore[attr-defined]
            own = [param for param in expert if param.group_name == name]  # type: ignore[attr-defined]
            added += [{**group, "name": name, "moe": True, "params": part} for part in _bounded(own, max_group_size)]
    return groups + added


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """The same for a list of parameters, or of groups, which may be split already."""
    if model_parameters and isinstance(model_parameters[0], nn.Parameter):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


def _bounded(params: list[nn.Parameter], most: float | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = []
    size = 0
    for param in params:
        if parts and (most is None or size + param.numel() <= most):
            parts[-1].append(param)
            size += param.numel()
        else:
            parts.append([param])
            size = param.numel()
    return parts
