"""Modules named `deepspeed...` for scripts that import them, made of what is here. DeepSpeed itself is not needed.

`install()` puts them in the place of DeepSpeed's for this process. A name that is not here raises `ImportError`, as an
old version of DeepSpeed would; a class that cannot be had says so when it is used.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import shardwise.integrations.deepspeed as ours
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed import making, moe, pipe, schedules, tensors, zero
from shardwise.integrations.deepspeed.config import Named

VERSION = "0.19.8"
"""Of the DeepSpeed whose names these are."""
logger = logging.getLogger("DeepSpeed")
_OF_EXPERTS = (
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
)


def install() -> None:
    """Let `import deepspeed`, in this process, find the modules of this one.

    Raises `ConfigError` if DeepSpeed itself has been imported before.
    """
    if "deepspeed" in sys.modules and not hasattr(sys.modules["deepspeed"], "is_shardwise"):
        raise ConfigError("DeepSpeed itself has been imported in this process. Ask for shardwise's before that.")
    for name, content in _modules().items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _modules() -> dict[str, dict[str, Any]]:
    """What is in each module; a package comes before those in it."""
    utils = {name: value for name, value in vars(tensors).items() if name.startswith(("safe_", "set_z3"))}
    utils |= {"logger": logger, "log_dist": log_dist, "RepeatingLoader": RepeatingLoader}
    own_zero = {name: getattr(zero, name) for name in ("Init", "GatheredParameters", "register_external_parameter")}
    in_stages = {name: getattr(pipe, name) for name in ("PipelineModule", "LayerSpec", "TiedLayerSpec")}
    rates = {name: kind for name, kind in vars(schedules).items() if name in schedules.SCHEDULES}
    recomputed = {"checkpoint": recompute, "configure": configure_recomputing, "is_configured": lambda: True}
    talk = {name: value for name, value in vars(dist).items() if not name.startswith("_")}
    return {
        "deepspeed": {
            **{name: getattr(ours, name) for name in ours.__all__},
            "__version__": VERSION,
            "is_shardwise": True,
            "log_dist": log_dist,
            "logger": logger,
        },
        "deepspeed.zero": own_zero,
        "deepspeed.pipe": in_stages,
        "deepspeed.utils": utils,
        "deepspeed.utils.logging": {"logger": logger, "log_dist": log_dist},
        "deepspeed.comm": {**talk, "init_distributed": making.init_distributed},
        "deepspeed.checkpointing": recomputed,
        "deepspeed.accelerator": {"get_accelerator": Accelerator},
        "deepspeed.ops": {},
        "deepspeed.ops.adam": {"FusedAdam": FusedAdam, "DeepSpeedCPUAdam": FusedAdam},
        "deepspeed.ops.lamb": {"FusedLamb": FusedLamb},
        "deepspeed.ops.lion": {"FusedLion": FusedLion, "DeepSpeedCPULion": FusedLion},
        "deepspeed.moe": {},
        "deepspeed.moe.layer": {"MoE": moe.MoE},
        "deepspeed.moe.utils": {name: getattr(moe, name) for name in _OF_EXPERTS},
        "deepspeed.runtime": {},
        "deepspeed.runtime.engine": {"DeepSpeedEngine": ours.DeepSpeedEngine},
        "deepspeed.runtime.lr_schedules": {**rates, "VALID_LR_SCHEDULES": list(schedules.SCHEDULES)},
        "deepspeed.runtime.utils": {"see_memory_usage": see_memory_usage},
        "deepspeed.runtime.pipe": in_stages,
        "deepspeed.runtime.pipe.module": in_stages,
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": recomputed,
        "deepspeed.runtime.zero": {},
        "deepspeed.runtime.zero.partition_parameters": {**own_zero, "ZeroParamStatus": ZeroParamStatus},
    }


class ZeroParamStatus(Enum):
    """Asked of parameters with a `ds_id`, which none has here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class FusedAdam:
    """`torch.optim.AdamW` with DeepSpeed's arguments; Adam with `adam_w_mode=False`. The engine updates it fused."""

    def __new__(cls, model_params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        if "adamw_mode" in options:  # as the one for the CPU calls it
            options["adam_w_mode"] = options.pop("adamw_mode")
        return making.make_optimizer(Named("Adam", {"lr": lr, **options}), list(model_params))


class FusedLamb:
    """`shardwise.optim.Lamb` with DeepSpeed's arguments."""

    def __new__(cls, params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        return making.make_optimizer(Named("Lamb", {"lr": lr, **options}), list(params))


class FusedLion:
    """`shardwise.optim.Lion` with DeepSpeed's arguments."""

    def __new__(cls, params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        return making.make_optimizer(Named("Lion", {"lr": lr, **options}), list(params))


class RepeatingLoader:
    """`loader` over and over."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._left = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._left)
        except StopIteration:
            self._left = iter(self.loader)
            return next(self._left)


class Accelerator:
    """What scripts ask of `get_accelerator()`, by torch's interface for all kinds."""

    _name = "cpu"

    def __init__(self) -> None:
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name = "cpu" if device is None else device.type

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(None if self._name == "cpu" else self.current_device())

    def current_device(self) -> int:
        return 0 if self._name == "cpu" else torch.accelerator.current_device_index()

    def set_device(self, device_index: int) -> None:
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        return 1 if self._name == "cpu" else torch.accelerator.device_count()

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._name != "cpu":
            torch.accelerator.synchronize()

    def communication_backend_name(self) -> str:
        return "nccl" if self._name == "cuda" else "gloo"

    def is_bf16_supported(self) -> bool:
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"get_accelerator().{name} is not supported by shardwise.integrations.deepspeed.")


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these ranks; on all, if none are named or one of them is -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False, ranks: list[int] | None = None) -> None:
    """Log `message`. `engine.shardwise.memory()` has what is held, promised and measured."""
    if force:
        log_dist(message, ranks)


def recompute(function: Any, *args: Any) -> Any:
    """`function(*args)`, whose activations are worked out again in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


def configure_recomputing(mpu_: object, *args: object, **options: object) -> None:
    """Taken, and not needed but for what it would change: raises `ConfigError` for activations elsewhere."""
    wanted = sorted(name for name in ("partition_activations", "checkpoint_in_cpu") if options.get(name))
    if wanted:
        raise ConfigError(f"deepspeed.checkpointing.configure({', '.join(wanted)}) is not supported here.")
