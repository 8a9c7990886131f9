"""Precision plugins of Lightning whose loss scaling and clipping the engine does."""

from __future__ import annotations

import copy
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ConfigError

_Base: Any = object


class EnginePrecision(_Base):
    """A mixin for a precision plugin: the engine scales the loss and clips; the plugin's forward context is kept."""

    precision: str
    scaler: Any
    engine: sw.Engine | None = None
    sole_optimizer: torch.optim.Optimizer | None = None
    """The optimizer with all trained parameters, if there is one."""

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        return super().pre_backward(tensor if self.engine is None else self.engine.scale(tensor), module)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        given = getattr(optimizer, "optimizer", optimizer)  # in manual optimization, in Lightning's wrapper
        if self.engine is None or given is not self.sole_optimizer:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.engine.clip_grad_norm_(clip_val)

    def attach(self, engine: sw.Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        """Use `engine` from now on. In fp16 it replaces the plugin's scaler."""
        if engine.scaler is not None:
            self.scaler = None
        self.engine = engine
        trained = {id(param) for param in engine.module.parameters() if param.requires_grad}
        self.sole_optimizer = None
        for one in optimizers:
            if trained <= {id(param) for group in one.param_groups for param in group["params"]}:
                self.sole_optimizer = one

    @property
    def is_mixed(self) -> bool:
        """Whether forwards run under autocast, with batches in fp32."""
        return self.precision.endswith("-mixed")


def with_engine(plugin: Any) -> Any:
    """A copy of a plugin with the mixin `EnginePrecision`. It keeps its class name, which checkpoints contain."""
    if isinstance(plugin, EnginePrecision):
        return plugin
    kind = type(plugin)
    ours = copy.copy(plugin)
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    ours.__class__ = type(kind.__name__, (EnginePrecision, kind), names)
    return ours


def refuse_scaler(plugin: Any, plan: sw.Plan) -> None:
    """Raise `ConfigError` for a GradScaler with custom settings under a plan with a loss scale."""
    scaler = getattr(plugin, "scaler", None)
    if plan.precision != "fp16" or scaler is None:
        return
    plain = torch.amp.GradScaler(device=plugin.device)
    if type(scaler) is not type(plain) or scaler.state_dict() != plain.state_dict():
        raise ConfigError(
            "The precision plugin has a GradScaler with custom settings, but in fp16 the engine scales the loss. Leave "
            "the scaler out and set loss_scale in the plan, or keep it and set precision: fp32 in the plan."
        )
