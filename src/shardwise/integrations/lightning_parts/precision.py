"""Precision plugins of Lightning, with what the engine does of their work."""

from __future__ import annotations

import copy
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ConfigError

_Base: Any = object


class EnginePrecision(_Base):
    """In front of a plugin: the engine has the loss scale and the norm; what the plugin does to a forward stays."""

    precision: str
    scaler: Any
    engine: sw.Engine | None = None
    sole_optimizer: torch.optim.Optimizer | None = None
    """The one that has all parameters that are trained, if one has."""

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        return super().pre_backward(tensor if self.engine is None else self.engine.scale(tensor), module)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        if self.engine is None or optimizer is not self.sole_optimizer:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.engine.clip_grad_norm_(clip_val)

    def attach(self, engine: sw.Engine, optimizers: list[torch.optim.Optimizer]) -> None:
        """From now on `engine` trains. Raises `ConfigError` for a scaler of the user's own beside the engine's."""
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
        """Whether forwards run under autocast, and batches stay in fp32."""
        return self.precision.endswith("-mixed")


def with_engine(plugin: Any) -> Any:
    """A copy of a plugin, of its class with `EnginePrecision` in front, by whose name checkpoints know it."""
    if isinstance(plugin, EnginePrecision):
        return plugin
    kind = type(plugin)
    ours = copy.copy(plugin)
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    ours.__class__ = type(kind.__name__, (EnginePrecision, kind), names)
    return ours


def refuse_scaler(plugin: Any, plan: sw.Plan) -> None:
    """Raise `ConfigError` for a GradScaler with settings of its own under a plan that has a loss scale."""
    scaler = getattr(plugin, "scaler", None)
    if plan.precision != "fp16" or scaler is None:
        return
    plain = torch.amp.GradScaler(device=plugin.device)
    if type(scaler) is not type(plain) or scaler.state_dict() != plain.state_dict():
        raise ConfigError(
            "The precision plugin has a GradScaler with settings of its own, and in fp16 the engine has the loss "
            "scale. Leave the scaler out and say loss_scale in the plan, or precision: fp32, by which it stays."
        )
