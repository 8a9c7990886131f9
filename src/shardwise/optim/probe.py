"""Tests whether an optimizer is elementwise, instead of keeping a list of those that are.

An optimizer that updates each element from that element's own gradient and state may be given any piece of a parameter.
One that looks at a whole matrix (Shampoo) or at all parameters (Prodigy) may not: on a shard it would silently compute
something else. Those of our own that look further declare what they need (`cooperative.py`). Any other is updated only
where every rank has its parameters whole, in their shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.optim.cooperative import Cooperative
from shardwise.optim.states import StatesOfPieces
from shardwise.optim.trials import Trial, is_like
from shardwise.program import Update

Tensor = torch.Tensor
StateForm = Literal["elements", "number", "whole"]
"""What a state of one parameter is: a tensor of the parameter's shape, one number, or a tensor of another shape."""
SHAPE = (4, 6)
KNOWN = frozenset(
    getattr(torch.optim, name)
    for name in "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD".split()  # noqa: SIM905
)
"""Torch's elementwise optimizers, which need no trial. Classes derived from them do."""


def vet(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> dict[nn.Parameter, Update]:
    """How each parameter of `optimizers` is updated. Changes nothing.

    Raises `ModelError` for one that no rank could use, for parameters that are not the model's, and for a parameter in
    two of them.
    """
    updates: dict[nn.Parameter, Update] = {}
    looking_further: list[str] = []
    for optimizer in optimizers:
        own = _vetted(optimizer, model)
        names = {param: name for name, param in model.named_parameters()}
        for param in (param for param in names if param in own and param in updates):
            raise ModelError(
                f"{names[param]} is in two of the optimizers, so it would be updated twice. Give each parameter to one."
            )
        updates |= own
        if any(update.looks_further for update in own.values()):
            looking_further.append(type(optimizer).__name__)
    if len(looking_further) > 1:
        raise ModelError(
            f"{' and '.join(looking_further)} both look at whole parameters, and a step's program has a place for one "
            f"such optimizer. Put their parameters into groups of one optimizer, or make the other elementwise."
        )
    return updates


def _vetted(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[nn.Parameter, Update]:
    if isinstance(optimizer.state, StatesOfPieces):
        raise ModelError(
            f"This {type(optimizer).__name__} is another engine's already. Make a new one over model.parameters()."
        )
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in known:
                raise ModelError(
                    f"Group {number} of the optimizer has a parameter of shape {tuple(param.shape)} that is not one "
                    f"of the model's. Make the optimizer from model.parameters(), of this same model. If it trains "
                    f"another module as well (a head of the loss, a second generator), shard both as one: "
                    f"sw.shard(nn.ModuleList([model, other]), ...); each is called as before."
                )
    return updates_of(optimizer, optimizer.param_groups)


def updates_of(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> dict[nn.Parameter, Update]:
    """How `optimizer` updates the parameters of these groups of it. Raises `ModelError` if it cannot be used."""
    if isinstance(optimizer, Cooperative):
        return {param: optimizer.update_of(param, group) for group in groups for param in group["params"]}
    alike: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        if group["params"]:
            alike[_kind_of(group)].append(group)
    found: dict[nn.Parameter, Update] = {}
    for some in alike.values():
        params = [param for group in some for param in group["params"]]
        found |= dict.fromkeys(params, probed(optimizer, {**some[0], "params": params}))
    whole = next((update.whole for update in found.values() if update.whole), None)
    # One that looks at all its parameters would miss those that it has only pieces of.
    return {param: replace(update, whole=update.whole or whole) for param, update in found.items()}


def _kind_of(group: Mapping[str, Any]) -> str:
    """Equal for groups whose parameters need one trial: trials vary the learning rate, and the decay only scales."""
    settings = {key: bool(value) if key == "weight_decay" else value for key, value in group.items()}
    return repr({key: value for key, value in settings.items() if key not in ("params", "param_names", "lr")})


def probed(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Update:
    """How `optimizer` updates parameters with the settings and the shapes of `group`, and what it keeps for them, such
    as Adam's two moments.

    Raises `ModelError` if it could not be used even on ranks that have all parameters whole.
    """
    if type(optimizer) in KNOWN:
        trial = Trial(optimizer, group, [SHAPE])
        trial.step()
        return Update(trial.states())
    from shardwise.optim.proof import tried  # only jobs with another one load it

    return tried(optimizer, group)


def state_keys(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], num_dims: int = 2
) -> dict[str, StateForm] | None:
    """The names of the states that `optimizer` keeps for a parameter of `num_dims` dimensions (0 counts as 1) with the
    settings of `group`, and their forms.

    `None` if that cannot be probed: not every setting works on a small matrix in host memory.
    """
    shape = (24,) if num_dims < 2 else (*(1,) * (num_dims - 2), *SHAPE)
    try:
        trial = Trial(optimizer, group, [shape])
        trial.step()
    except Exception:  # an optimizer that raises anything here has unknown states
        return None
    twin, param = trial.twin, trial.params[0]
    state = twin.dense_state(param) if isinstance(twin, Cooperative) else twin.state[param]
    return {key: _form_of(value, param) for key, value in state.items() if value is not None}


def _form_of(value: Any, param: nn.Parameter) -> StateForm:
    if is_like(value, param):
        return "elements"
    return "whole" if isinstance(value, Tensor) and value.dim() else "number"
