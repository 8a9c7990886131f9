"""Tests whether an optimizer is elementwise, instead of keeping a list.

An optimizer that updates each element from that element's own gradient and state may be given any piece of a parameter.
One that looks at a whole matrix (torch's Adafactor) or at all parameters (LBFGS) may not: on a shard it would silently
compute something else. Those of our own that look further declare what they need (`cooperative.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.optim.cooperative import Alone, Cooperative
from shardwise.optim.states import StatesOfPieces, first_states
from shardwise.program import States, Update

StateForm = Literal["elements", "number", "whole"]
"""What a state of one parameter is: a tensor of the parameter's shape, one number, or a tensor of another shape."""
SHAPE = (4, 6)
NUM_STEPS = 3


ADVICE = {
    "Muon": "Use shardwise.optim.Muon, which takes the same settings and works on whole matrices.",
    "Lamb": "Use shardwise.optim.Lamb, which sums the norms over all ranks.",
    "LAMB": "Use shardwise.optim.Lamb, which sums the norms over all ranks.",
    "Adafactor": "Use shardwise.optim.Adafactor, which sums rows and columns over all ranks.",
    "LBFGS": "It evaluates the model several times in a step and looks at all parameters together; use AdamW or SGD.",
    "SparseAdam": "Make the embedding with sparse=False, and use Adam or AdamW.",
}
"""By the name of the class, whichever library it is from."""
OTHERWISE = "Use an elementwise optimizer such as AdamW, SGD or Adagrad, or one of shardwise.optim."


def vet(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> dict[nn.Parameter, Update]:
    """How each parameter of `optimizers` is updated. Changes nothing.

    Raises `ModelError` unless the optimizers are elementwise, or declare what they need, over parameters of `model`,
    with no parameter in two of them.
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
        if any(update.needs_norm or update.matrix for update in own.values()):
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
    updates: dict[nn.Parameter, Update] = {}
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in known:
                raise ModelError(
                    f"Group {number} of the optimizer has a parameter of shape {tuple(param.shape)} that is not one "
                    f"of the model's. Make the optimizer from model.parameters(), of this same model."
                )
        if isinstance(optimizer, Cooperative):
            updates |= {param: optimizer.update_of(param, group) for param in group["params"]}
        else:
            updates |= dict.fromkeys(group["params"], Update(probed(optimizer, group)))
    return updates


def probed(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> States:
    """What `optimizer` keeps for a parameter with the settings of `group`, such as Adam's two moments.

    Raises `ModelError` unless a whole matrix and its pieces are updated alike.
    """
    name = type(optimizer).__name__
    advice = ADVICE.get(name, OTHERWISE)
    start = torch.linspace(-1, 1, 24, dtype=torch.float32).reshape(SHAPE)
    whole = [nn.Parameter(start.clone())]
    pieces = [nn.Parameter(start.flatten()[:7].clone()), nn.Parameter(start.flatten()[7:].clone())]
    try:
        states = _run(optimizer, group, whole)
        _run(optimizer, group, pieces)
    except Exception as error:  # an optimizer that raises anything here cannot be used
        raise ModelError(
            f"{name} cannot update a flat piece of a parameter ({type(error).__name__}: {error}), so its "
            f"state cannot be sharded. {advice}"
        ) from error
    together = torch.cat([piece.detach() for piece in pieces]).reshape(SHAPE)
    if not torch.allclose(whole[0].detach(), together, rtol=1e-5, atol=1e-7):
        raise ModelError(
            f"{name} is not elementwise: it updates a matrix differently from its pieces, so sharding its "
            f"state would change the result. {advice}"
        )
    return states


def state_keys(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], num_dims: int = 2
) -> dict[str, StateForm] | None:
    """The names of the states that `optimizer` keeps for a parameter of `num_dims` dimensions (0 counts as 1) with the
    settings of `group`, and their forms.

    `None` if that cannot be probed: not every setting works on a small matrix in host memory.
    """
    shape = (24,) if num_dims < 2 else (*(1,) * (num_dims - 2), *SHAPE)
    param = nn.Parameter(torch.linspace(-1, 1, 24, dtype=torch.float32).reshape(shape))
    try:
        twin = _stepped(optimizer, group, [param], num_steps=1)
    except Exception:  # an optimizer that raises anything here has unknown states
        return None
    state = twin.dense_state(param) if isinstance(twin, Cooperative) else twin.state[param]
    return {key: _form_of(value, param) for key, value in state.items() if value is not None}


def _form_of(value: Any, param: nn.Parameter) -> StateForm:
    if _is_like(value, param):
        return "elements"
    return "whole" if isinstance(value, torch.Tensor) and value.dim() else "number"


def _run(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> States:
    """What a twin of `optimizer` keeps for the first of `params` after a few steps."""
    twin = _stepped(optimizer, group, params, NUM_STEPS)
    kept = [value for value in twin.state[params[0]].values() if _is_like(value, params[0])]
    copies = [value for value in kept if value.dtype == params[0].dtype]
    return States(len(copies), sum(value.itemsize for value in kept) - sum(value.itemsize for value in copies))


def _stepped(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter], num_steps: int
) -> torch.optim.Optimizer:
    """A twin of `optimizer` after some steps on `params`, with this group's settings and fixed gradients."""
    twin = twin_of(optimizer, group, params)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        grads = torch.randn(24, generator=numbers)
        start = 0
        for param in params:
            param.grad = grads[start : start + param.numel()].reshape(param.shape).clone()
            start += param.numel()
        type(twin).step(twin)
    return twin


def twin_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], params: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Another optimizer of the same class over `params`, with this group's settings, without states and hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have wrapped the original's
    hooks = {key: type(value)() for key, value in optimizer.__dict__.items() if key.endswith("_hooks")}
    twin.__dict__.update(hooks)
    if isinstance(twin, Cooperative):
        twin.peers = Alone()
    twin.state = defaultdict(dict, first_states(optimizer, params))
    twin.param_groups = [{**group, "params": list(params)}]
    return twin


def _is_like(value: object, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == param.shape
