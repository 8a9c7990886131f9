"""Checks whether an optimizer's states can lie on a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.memory import torch_dtype
from shardwise.optim.cooperative import Cooperative
from shardwise.optim.trials import has_modes, twin_of
from shardwise.plan.placement import Table
from shardwise.program import SMALL_NUMEL


def require_states_for_disk(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], tables: Mapping[nn.Parameter, Table]
) -> None:
    """Raise `ModelError` if states of a parameter whose row is on a disk cannot lie there."""
    names = {param: name for name, param in model.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            there = [param for param in group["params"] if param in tables and tables[param].optim.tier == "disk"]
            for dtype in {tables[param].optim.dtype for param in there}:
                try:
                    state_dtypes(optimizer, group, torch_dtype(dtype))
                except ModelError as error:
                    raise ModelError(
                        f"{names.get(there[0], 'A parameter')} has its states on a disk. {error} Or put them on the "
                        f"host: rows.optim.tier: host."
                    ) from error


def require_no_counts(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a step changes settings of the group: slices would each count."""
    param = nn.Parameter(torch.ones(1, device="cpu"))
    twin = twin_of(optimizer, group, [param])
    param.grad = torch.ones_like(param)
    type(twin).step(twin)
    own = twin.param_groups[0]
    changed = [key for key in own if key != "params" and not (key in group and own[key] is group[key])]
    if changed:
        raise ModelError(
            f"A step of {type(optimizer).__name__} changes {changed[0]} of its group, and DiskStates takes a step for "
            f"each slice. Use an optimizer that counts in the state of each parameter, as those of torch do."
        )


def state_dtypes(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """The states that `optimizer` keeps in the shape of a parameter of `dtype`, by name.

    Raises `ModelError` for one with other states, or one that looks at more than each element.
    """
    name = type(optimizer).__name__
    param = nn.Parameter(
        torch.linspace(-1, 1, 2 * SMALL_NUMEL, dtype=dtype, device="cpu")
    )  # large enough for narrow states
    if isinstance(optimizer, Cooperative):
        update = optimizer.update_of(param, group)
        if update.needs_norm or update.matrix:
            raise ModelError(f"{name} looks at whole parameters, and on a disk they are updated slice by slice.")
    elif has_modes(optimizer):
        raise ModelError(
            f"{name} moves parameters in train() and eval(), outside a step, which they do not from a disk."
        )
    twin = twin_of(optimizer, group, [param])
    param.grad = torch.ones_like(param)
    type(twin).step(twin)
    kept = {key: value for key, value in twin.state[param].items() if isinstance(value, torch.Tensor) and value.dim()}
    for key, value in kept.items():
        if value.shape != param.shape or value.dtype != dtype:
            raise ModelError(
                f"{name} keeps {key} as {str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)} for a "
                f"parameter of {param.numel()} elements. States on a disk have the parameter's shape and dtype: "
                f"use state_dtype='fp32'."
            )
    return {key: value.dtype for key, value in kept.items()}
