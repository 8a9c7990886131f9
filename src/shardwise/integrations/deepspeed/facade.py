"""Modules named `deepspeed...` for scripts that import them, built from this package. DeepSpeed itself is not needed.

`install()` registers them in this process. A name that they do not have raises `ImportError`, as with an old version of
DeepSpeed; for the names in `absent_names.py` it says what to use instead.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import shardwise.integrations.deepspeed as ours
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed import initialization, moe, pipe, schedules, stored, tensors, topology, zero
from shardwise.integrations.deepspeed.absent_names import RefusedImports, attribute_errors
from shardwise.integrations.deepspeed.accelerator import Accelerator
from shardwise.integrations.deepspeed.config import ComponentConfig

VERSION = "0.19.8"
"""The version of DeepSpeed whose API this is."""
logger = logging.getLogger("DeepSpeed")
_MOE_UTILS = (
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
)


def install() -> None:
    """Let `import deepspeed` import these modules in this process.

    Raises `ConfigError` if DeepSpeed itself has already been imported.
    """
    if "deepspeed" in sys.modules and not hasattr(sys.modules["deepspeed"], "is_shardwise"):
        raise ConfigError(
            "DeepSpeed itself has already been imported in this process. Call install() before anything imports it."
        )
    if not any(isinstance(finder, RefusedImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, RefusedImports())
    for name, content in _modules().items():
        module = ModuleType(name)
        module.__dict__["__getattr__"] = attribute_errors(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _modules() -> dict[str, dict[str, Any]]:
    """The contents of each module. A package precedes its submodules."""
    utils = {name: value for name, value in vars(tensors).items() if name.startswith(("safe_", "set_z3"))}
    utils |= {"logger": logger, "log_dist": log_dist, "RepeatingLoader": RepeatingLoader, "OnDevice": zero.OnDevice}
    own_zero = {name: getattr(zero, name) for name in ("Init", "GatheredParameters", "register_external_parameter")}
    pipeline = {name: getattr(pipe, name) for name in ("PipelineModule", "LayerSpec", "TiedLayerSpec")}
    grid = {name: value for name, value in vars(topology).items() if name.endswith("Topology")}
    lr_schedules = {name: kind for name, kind in vars(schedules).items() if name in schedules.SCHEDULES}
    checkpointing = {"checkpoint": pipe.recompute, "configure": configure_recomputing, "is_configured": lambda: True}
    comm = {name: value for name, value in vars(dist).items() if not name.startswith("_")}
    return {
        "deepspeed": {
            **{name: getattr(ours, name) for name in ours.__all__},
            "__version__": VERSION,
            "is_shardwise": True,
            "OnDevice": zero.OnDevice,
            "get_accelerator": Accelerator,
            "log_dist": log_dist,
            "logger": logger,
        },
        "deepspeed.zero": own_zero,
        "deepspeed.pipe": pipeline,
        "deepspeed.utils": utils,
        "deepspeed.utils.logging": {"logger": logger, "log_dist": log_dist},
        "deepspeed.utils.init_on_device": {"OnDevice": zero.OnDevice},
        "deepspeed.utils.zero_to_fp32": {name: getattr(stored, name) for name in stored.__all__},
        "deepspeed.comm": {**comm, "init_distributed": initialization.init_distributed},
        "deepspeed.checkpointing": checkpointing,
        "deepspeed.accelerator": {"get_accelerator": Accelerator},
        "deepspeed.ops": {},
        "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": CPUAdagrad},
        "deepspeed.ops.adam": {"FusedAdam": FusedAdam, "DeepSpeedCPUAdam": FusedAdam},
        "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": FusedAdam},
        "deepspeed.ops.adam.fused_adam": {"FusedAdam": FusedAdam},
        "deepspeed.ops.lamb": {"FusedLamb": FusedLamb},
        "deepspeed.ops.lion": {"FusedLion": FusedLion, "DeepSpeedCPULion": FusedLion},
        "deepspeed.moe": {},
        "deepspeed.moe.layer": {"MoE": moe.MoE},
        "deepspeed.moe.utils": {name: getattr(moe, name) for name in _MOE_UTILS},
        "deepspeed.runtime": {},
        "deepspeed.runtime.engine": {"DeepSpeedEngine": ours.DeepSpeedEngine},
        "deepspeed.runtime.lr_schedules": {**lr_schedules, "VALID_LR_SCHEDULES": list(schedules.SCHEDULES)},
        "deepspeed.runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
        "deepspeed.runtime.utils": {"see_memory_usage": see_memory_usage, "set_random_seed": pipe.set_random_seed},
        "deepspeed.runtime.pipe": {**pipeline, "ProcessTopology": topology.ProcessTopology},
        "deepspeed.runtime.pipe.module": pipeline,
        "deepspeed.runtime.pipe.topology": grid,
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": checkpointing,
        "deepspeed.runtime.zero": {},
        "deepspeed.runtime.zero.partition_parameters": {**own_zero, "ZeroParamStatus": ZeroParamStatus},
    }


class ZeroParamStatus(Enum):
    """The status of parameters with a `ds_id`. Parameters have none here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class FusedAdam:
    """`torch.optim.AdamW` with DeepSpeed's arguments; Adam with `adam_w_mode=False`. The engine fuses its updates."""

    def __new__(cls, model_params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        if "adamw_mode" in options:  # the name in DeepSpeedCPUAdam
            options["adam_w_mode"] = options.pop("adamw_mode")
        return initialization.make_optimizer(ComponentConfig("Adam", {"lr": lr, **options}), list(model_params))


class CPUAdagrad:
    """`torch.optim.Adagrad` with DeepSpeed's arguments. The engine updates on the CPU what is offloaded there."""

    def __new__(cls, model_params: Any, lr: float = 1e-2, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        if options.pop("amsgrad", False):
            raise ConfigError("DeepSpeedCPUAdagrad(amsgrad=True) has no effect in DeepSpeed either. Leave it out.")
        return initialization.make_optimizer(ComponentConfig("Adagrad", {"lr": lr, **options}), list(model_params))


class FusedLamb:
    """`shardwise.optim.Lamb` with DeepSpeed's arguments."""

    def __new__(cls, params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        return initialization.make_optimizer(ComponentConfig("Lamb", {"lr": lr, **options}), list(params))


class FusedLion:
    """`shardwise.optim.Lion` with DeepSpeed's arguments."""

    def __new__(cls, params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        return initialization.make_optimizer(ComponentConfig("Lion", {"lr": lr, **options}), list(params))


class RepeatingLoader:
    """Iterates over `loader` endlessly."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)


def log_dist(message: str, ranks: list[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on `ranks`; on all ranks if there are none, or if they include -1."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or rank in ranks or -1 in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False, ranks: list[int] | None = None) -> None:
    """Log `message` if `force` is true. For figures use `engine.shardwise.memory()`."""
    if force:
        log_dist(message, ranks)


def configure_recomputing(mpu_: object, *args: object, **options: object) -> None:
    """Accepts and ignores all options but those that would store activations elsewhere, which raise `ConfigError`."""
    wanted = sorted(name for name in ("partition_activations", "checkpoint_in_cpu") if options.get(name))
    if wanted:
        raise ConfigError(
            f"deepspeed.checkpointing.configure({', '.join(wanted)}) is not supported by shardwise. To keep "
            f"activations on the host, use `activations: offload` in a plan (docs/activations.md)."
        )
