"""The optimizers of `deepspeed.ops` and `deepspeed.runtime.fp16.onebit`, by their names and arguments there.

Each makes an optimizer of torch's or ours, as the config's optimizer of that name does. The engine fuses the updates of
all, and does on the CPU what is offloaded there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed.config import ComponentConfig
from shardwise.integrations.deepspeed.initialization import make_optimizer

Optimizer = torch.optim.Optimizer


class _Factory(type):
    """The class of names that make optimizers of another one, `KIND`; `isinstance` asks for one of those."""

    NAME: str
    """In the config."""
    KIND: type[Optimizer]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.KIND)

    def make(cls, params: Iterable[Any], lr: float, options: Mapping[str, Any]) -> Optimizer:
        return make_optimizer(ComponentConfig(cls.NAME, {"lr": lr, **options}), list(params))


class _Fused(metaclass=_Factory):
    def __new__(cls, params: Any, lr: float = 1e-3, **options: Any) -> Optimizer:  # type: ignore[misc]
        return cls.make(params, lr, options)


class FusedAdam(_Fused):
    """`torch.optim.AdamW`; Adam with `adam_w_mode=False`."""

    NAME, KIND = "Adam", torch.optim.Adam  # AdamW is derived from it


class FusedLamb(_Fused):
    """`shardwise.optim.Lamb`."""

    NAME, KIND = "Lamb", sw.optim.Lamb


class FusedLion(_Fused):
    """`shardwise.optim.Lion`."""

    NAME, KIND = "Lion", sw.optim.Lion


class CPUAdam(metaclass=_Factory):
    """As `FusedAdam`, with the arguments of `DeepSpeedCPUAdam`."""

    NAME, KIND = FusedAdam.NAME, FusedAdam.KIND

    def __new__(cls, model_params: Any, lr: float = 1e-3, **options: Any) -> Optimizer:  # type: ignore[misc]
        if "adamw_mode" in options:
            options["adam_w_mode"] = options.pop("adamw_mode")
        return cls.make(model_params, lr, options)


class CPULion(metaclass=_Factory):
    """As `FusedLion`, with the arguments of `DeepSpeedCPULion`."""

    NAME, KIND = FusedLion.NAME, FusedLion.KIND

    def __new__(cls, model_params: Any, lr: float = 1e-3, **options: Any) -> Optimizer:  # type: ignore[misc]
        return cls.make(model_params, lr, options)


class CPUAdagrad(metaclass=_Factory):
    """`torch.optim.Adagrad`, with the arguments of `DeepSpeedCPUAdagrad`."""

    NAME, KIND = "Adagrad", torch.optim.Adagrad

    def __new__(cls, model_params: Any, lr: float = 1e-2, **options: Any) -> Optimizer:  # type: ignore[misc]
        if options.pop("amsgrad", False):
            raise ConfigError("DeepSpeedCPUAdagrad(amsgrad=True) has no effect in DeepSpeed either. Leave it out.")
        return cls.make(model_params, lr, options)


class _OneBit(metaclass=_Factory):
    """The second argument is DeepSpeed's engine, and is not needed."""

    def __new__(cls, params: Any, deepspeed: object = None, lr: float = 1e-3, **options: Any) -> Optimizer:  # type: ignore[misc]
        return cls.make(params, lr, options)


class OnebitAdam(_OneBit):
    """`shardwise.optim.OneBitAdam`."""

    NAME, KIND = "OneBitAdam", sw.optim.OneBitAdam


class OnebitLamb(_OneBit):
    """`shardwise.optim.OneBitLamb`."""

    NAME, KIND = "OneBitLamb", sw.optim.OneBitLamb


class ZeroOneAdam(_OneBit):
    """`shardwise.optim.ZeroOneAdam`."""

    NAME, KIND = "ZeroOneAdam", sw.optim.ZeroOneAdam
