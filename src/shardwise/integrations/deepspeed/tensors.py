"""`deepspeed.utils`: a parameter's whole tensors on every rank. All ranks call, between backward and step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.integrations.deepspeed.engine import DeepSpeedEngine, engines_of


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 master weight; `None` for a frozen one, which has none. `engine.shardwise.get(name)` reads
    any."""
    return _get(param, "param") if param.requires_grad else None


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace what `safe_get_full_fp32_param` returns; the same `value` on every rank."""
    _set(param, value, "param")


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient, averaged over ranks; `None` if the parameter has none."""
    return _get(param, "grad")


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace what `safe_get_full_grad` returns; the same `value` on every rank."""
    _set(param, value, "grad")


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """A whole optimizer state, such as `exp_avg`; `fp32` is the master weight."""
    return _get(param, "param" if optim_state_key == "fp32" else optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace what `safe_get_full_optimizer_state` returns; the same `value` on every rank."""
    _set(param, value, "param" if optim_state_key == "fp32" else optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: list[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace each whole gradient by `update_func(gradient, param)`, which all ranks compute alike."""
    for param in param_list:
        gradient = safe_get_full_grad(param) if param.requires_grad else None
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def _get(param: nn.Parameter, what: str) -> torch.Tensor | None:
    engine, name = _owner(param)
    return engine.shardwise.get(name, what)


def _set(param: nn.Parameter, value: torch.Tensor, what: str) -> None:
    engine, name = _owner(param)
    engine.shardwise.set(name, value, what)


def _owner(param: nn.Parameter) -> tuple[DeepSpeedEngine, str]:
    found = engines_of([param])
    if not found:
        raise StateError("This parameter does not belong to an open engine. Call initialize() with its model first.")
    engine, names = found[0]
    return engine, names[0]
