"""Modules named `deepspeed...` for scripts that import them, built from this package. DeepSpeed itself is not needed.

`install()` registers them in this process. A name that they do not have raises `ImportError`, as with an old version of
DeepSpeed; for the names in `names.py` it says what to use instead.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import shardwise.integrations.deepspeed as ours
from shardwise.errors import ConfigError
from shardwise.integrations.deepspeed import (
    collectives,
    elasticity,
    enums,
    initialization,
    leaf_modules,
    moe,
    pipe,
    schedules,
    stored,
    tensors,
    tiling,
    timers,
    topology,
    zero,
)
from shardwise.integrations.deepspeed import logging as messages
from shardwise.integrations.deepspeed.accelerator import get_accelerator, is_current_accelerator_supported
from shardwise.integrations.deepspeed.config import load_config
from shardwise.integrations.deepspeed.logging import log_dist, logger
from shardwise.integrations.deepspeed.monitor import MonitorMaster, get_monitor_config
from shardwise.integrations.deepspeed.names import RefusedImports, refusal
from shardwise.integrations.deepspeed.optimizers import (
    CPUAdagrad,
    CPUAdam,
    CPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
    OnebitAdam,
    OnebitLamb,
    ZeroOneAdam,
)
from shardwise.integrations.name_table import attribute_errors

VERSION = "0.19.8"
"""The version of DeepSpeed whose API this is."""
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
        module.__dict__["__getattr__"] = attribute_errors(name, refusal)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        module.__dict__.update(content)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent and not callable(getattr(sys.modules[parent], child, None)):  # a function may have its module's name
            setattr(sys.modules[parent], child, module)
    vars(sys.modules["deepspeed"])["dist"] = sys.modules["deepspeed.comm"]


def _modules() -> dict[str, dict[str, Any]]:
    """The contents of each module. A package precedes its submodules."""
    contents = {**_entry_modules(), **_utility_modules(), **_part_modules(), **_runtime_modules(), **_zero_modules()}
    return dict(sorted(contents.items()))


_DEVICES = {
    "get_accelerator": get_accelerator,
    "is_current_accelerator_supported": is_current_accelerator_supported,
}
_CONFIGS = {"DeepSpeedConfig": enums.DeepSpeedConfig, "DeepSpeedConfigError": ConfigError}
_PIPELINE = {name: getattr(pipe, name) for name in ("PipelineModule", "LayerSpec", "TiedLayerSpec")}


def _entry_modules() -> dict[str, dict[str, Any]]:
    comm = {name: value for name, value in vars(dist).items() if name[0] != "_" and not _is_module(value)}
    comm |= {**_functions_of(collectives), "init_distributed": initialization.init_distributed}
    return {
        "deepspeed": {
            **{name: getattr(ours, name) for name in ours.__all__},
            **_DEVICES,
            **_CONFIGS,
            "__version__": VERSION,
            "version": VERSION,
            "is_shardwise": True,
            "DeepSpeedOptimizerCallable": Callable[..., torch.optim.Optimizer],
            "DeepSpeedSchedulerCallable": Callable[..., Any],
            "OnDevice": zero.OnDevice,
            "log_dist": log_dist,
            "logger": logger,
        },
        "deepspeed.git_version_info": {
            "version": VERSION,
            "git_hash": None,
            "git_branch": None,
            "torch_info": torch_info(),
        },
        "deepspeed.comm": comm,
        "deepspeed.comm.comm": comm,
        "deepspeed.checkpointing": _CHECKPOINTING,
        "deepspeed.accelerator": _DEVICES,
        "deepspeed.accelerator.real_accelerator": _DEVICES,
        "deepspeed.pipe": _PIPELINE,
        "deepspeed.inference": {},
        "deepspeed.inference.engine": {"InferenceEngine": ours.InferenceEngine},
        "deepspeed.launcher": {},
        "deepspeed.launcher.runner": {
            "main": launch,
            "DEEPSPEED_ENVIRONMENT_NAME": os.environ.get("DS_ENV_FILE", ".deepspeed_env"),
        },
    }


def _utility_modules() -> dict[str, dict[str, Any]]:
    leaves, words = _functions_of(leaf_modules), _functions_of(messages)
    fragments = {name: value for name, value in vars(tensors).items() if name.startswith("safe_")}
    utils = {**fragments, **leaves, "OnDevice": zero.OnDevice, "RepeatingLoader": RepeatingLoader}
    utils |= {name: words[name] for name in ("log_dist", "log_dist_once", "set_log_level_from_string")}
    return {
        "deepspeed.utils": {**utils, "logger": logger, "instrument_w_nvtx": instrument_w_nvtx},
        "deepspeed.utils.logging": {**words, "logger": logger, "log_levels": messages.LEVELS},
        "deepspeed.utils.init_on_device": {"OnDevice": zero.OnDevice},
        "deepspeed.utils.nvtx": {"instrument_w_nvtx": instrument_w_nvtx},
        "deepspeed.utils.tensor_fragment": fragments,
        "deepspeed.utils.timer": {**_functions_of(timers), **_classes_of(timers)},
        "deepspeed.utils.torch": {"required_torch_version": required_torch_version},
        "deepspeed.utils.z3_leaf_module": leaves,
        "deepspeed.utils.zero_to_fp32": {name: getattr(stored, name) for name in stored.__all__},
    }


def _part_modules() -> dict[str, dict[str, Any]]:
    elastic = {name: getattr(elasticity, name) for name in elasticity.__all__}
    return {
        "deepspeed.compression": {},
        "deepspeed.compression.helper": {
            "recursive_getattr": recursive_getattr,
            "recursive_setattr": recursive_setattr,
        },
        "deepspeed.elasticity": elastic,
        "deepspeed.elasticity.config": elastic,
        "deepspeed.elasticity.elasticity": elastic,
        "deepspeed.monitor": {},
        "deepspeed.monitor.config": {"get_monitor_config": get_monitor_config},
        "deepspeed.monitor.monitor": {"MonitorMaster": MonitorMaster},
        "deepspeed.ops": {"__compatible_ops__": _Builders()},
        "deepspeed.ops.op_builder": {name: type(name, (_Builder,), {"NAME": op}) for name, op in _BUILDERS.items()},
        "deepspeed.ops.adagrad": {"DeepSpeedCPUAdagrad": CPUAdagrad},
        "deepspeed.ops.adam": {"FusedAdam": FusedAdam, "DeepSpeedCPUAdam": CPUAdam},
        "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": CPUAdam},
        "deepspeed.ops.adam.fused_adam": {"FusedAdam": FusedAdam},
        "deepspeed.ops.lamb": {"FusedLamb": FusedLamb},
        "deepspeed.ops.lion": {"FusedLion": FusedLion, "DeepSpeedCPULion": CPULion},
        "deepspeed.moe": {},
        "deepspeed.moe.layer": {"MoE": moe.MoE},
        "deepspeed.moe.utils": {"MoE": moe.MoE, **{name: getattr(moe, name) for name in _MOE_UTILS}},
    }


def _runtime_modules() -> dict[str, dict[str, Any]]:
    lr_schedules = {
        **schedules.SCHEDULES,
        **schedules.NAMES_OF_OPTIONS,
        "VALID_LR_SCHEDULES": list(schedules.SCHEDULES),
    }
    return {
        "deepspeed.runtime": {},
        "deepspeed.runtime.config": _CONFIGS,
        "deepspeed.runtime.engine": {"DeepSpeedEngine": ours.DeepSpeedEngine},
        "deepspeed.runtime.fp16": {},
        "deepspeed.runtime.fp16.onebit": {
            "OnebitAdam": OnebitAdam,
            "OnebitLamb": OnebitLamb,
            "ZeroOneAdam": ZeroOneAdam,
        },
        "deepspeed.runtime.fp16.onebit.adam": {"OnebitAdam": OnebitAdam},
        "deepspeed.runtime.fp16.onebit.lamb": {"OnebitLamb": OnebitLamb},
        "deepspeed.runtime.fp16.onebit.zoadam": {"ZeroOneAdam": ZeroOneAdam},
        "deepspeed.runtime.hybrid_engine": {"DeepSpeedHybridEngine": ours.DeepSpeedHybridEngine},
        "deepspeed.runtime.lr_schedules": lr_schedules,
        "deepspeed.runtime.dataloader": {"RepeatingLoader": RepeatingLoader},
        "deepspeed.runtime.utils": {
            "empty_cache": empty_cache,
            "move_to_device": pipe.move_to_device,
            "noop_context": nullcontext,
            "see_memory_usage": see_memory_usage,
            "set_random_seed": pipe.set_random_seed,
        },
        "deepspeed.runtime.pipe": {**_PIPELINE, "ProcessTopology": topology.ProcessTopology},
        "deepspeed.runtime.pipe.engine": {"PipelineEngine": ours.PipelineEngine},
        "deepspeed.runtime.pipe.module": _PIPELINE,
        "deepspeed.runtime.pipe.topology": {
            name: value for name, value in vars(topology).items() if name.endswith("Topology")
        },
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    }


def _zero_modules() -> dict[str, dict[str, Any]]:
    tiled = {name: getattr(tiling, name) for name in ("TiledLinear", "TiledLinearReturnBias")}
    partitioned = {
        "Init": zero.Init,
        "GatheredParameters": zero.GatheredParameters,
        "register_external_parameter": zero.register_external_parameter,
        "unregister_external_parameter": zero.unregister_external_parameter,  # in `zero` by its documentation alone
        "ZeroParamStatus": enums.ZeroParamStatus,
    }
    own = {
        **partitioned,
        **tiled,
        "MiCS_Init": zero.MiCS_Init,
        "unwrap_model_for_generation": zero.unwrap_model_for_generation,
    }
    return {
        "deepspeed.zero": own,
        "deepspeed.runtime.zero": own,
        "deepspeed.runtime.zero.config": {"ZeroStageEnum": enums.ZeroStageEnum},
        "deepspeed.runtime.zero.offload_config": {
            "OffloadDeviceEnum": enums.OffloadDeviceEnum,
            "OffloadStateTypeEnum": enums.OffloadStateTypeEnum,
        },
        "deepspeed.runtime.zero.partition_parameters": partitioned,
        "deepspeed.runtime.zero.tiling": tiled,
    }


def _is_module(value: object) -> bool:
    return issubclass(type(value), ModuleType)  # isinstance() would make torch warn of its deprecated reduce_op


def _functions_of(module: ModuleType) -> dict[str, Any]:
    """The public functions that a module defines."""
    return {
        name: value
        for name, value in vars(module).items()
        if callable(value) and not isinstance(value, type) and not name.startswith("_") and _is_of(value, module)
    }


def _classes_of(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and not name.startswith("_") and _is_of(value, module)
    }


def _is_of(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


_BUILDERS = {
    "AsyncIOBuilder": "async_io",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "SparseAttnBuilder": "sparse_attn",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
_HAD = frozenset(("cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"))
"""Optimizers that need no kernels of DeepSpeed's here."""


class _Builder:
    """A builder of DeepSpeed's kernels, for scripts that ask whether there is one. Nothing is compiled."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        return self.NAME in _HAD

    def builder_available(self) -> bool:
        return self.NAME in _HAD

    def load(self, verbose: bool = True) -> Any:
        raise ConfigError(
            f"{type(self).__name__}().load() is not supported: nothing is compiled. Use the optimizers of "
            f"deepspeed.ops, or those that the config names."
        )


class _Builders(dict[str, bool]):
    """Whether there is what each kernel of DeepSpeed's is for; not, for other names."""

    def __missing__(self, name: str) -> bool:
        return name in _HAD


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


def see_memory_usage(message: str, force: bool = False, ranks: list[int] | None = None) -> None:
    """Log `message` if `force` is true. For figures use `engine.shardwise.memory()`."""
    if force:
        log_dist(message, ranks)


def configure_recomputing(
    mpu_: object, deepspeed_config: str | Mapping[str, Any] | None = None, *args: object, **options: object
) -> None:
    """Accepts and ignores all options but those that would store activations elsewhere, which raise `ConfigError`."""
    section = {} if deepspeed_config is None else load_config(deepspeed_config).get("activation_checkpointing", {})
    renamed = {"cpu_checkpointing": "checkpoint_in_cpu"}
    asked = {renamed.get(name, name): value for name, value in section.items()}
    asked |= {name: value for name, value in options.items() if value is not None}
    wanted = sorted(name for name in ("partition_activations", "checkpoint_in_cpu") if asked.get(name))
    if wanted:
        raise ConfigError(
            f"deepspeed.checkpointing.configure({', '.join(wanted)}) is not supported by shardwise. To keep "
            f"activations on the host, use `activations: offload` in a plan (docs/activations.md)."
        )


def torch_info() -> dict[str, Any]:
    """Versions of torch and of what it was built with, of two numbers each; `0.0` for what it lacks."""
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    found = {
        "version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "hip_version": torch.version.hip,
        "nccl_version": ".".join(map(str, nccl.version())) if has_nccl else None,
    }
    versions = {name: ".".join(map(str, _numbers(text))) if text else "0.0" for name, text in found.items()}
    return {**versions, "bf16_support": get_accelerator().is_bf16_supported()}


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version is within these bounds, which are included."""
    if min_version is None and max_version is None:
        raise ValueError("required_torch_version() needs min_version or max_version.")
    now = _numbers(torch.__version__)
    is_above = min_version is None or now >= _numbers(str(min_version))
    return is_above and (max_version is None or now <= _numbers(str(max_version)))


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:2])


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """`func`, as a range for the device's profiler."""

    @wraps(func)
    def marked(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return marked


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The module of this dotted name in `model`; numbers are indices."""
    for part in module_name.split("."):
        model = model[int(part)] if part.isdecimal() and not hasattr(model, part) else getattr(model, part)
    return model


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Put `module` in the place of this dotted name in `model`."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def empty_cache() -> None:
    get_accelerator().empty_cache()


def launch(args: list[str] | None = None) -> None:
    """DeepSpeed's command line: `shardwise deepspeed`."""
    words = sys.argv[1:] if args is None else args
    sys.exit(subprocess.call([sys.executable, "-m", "shardwise", "deepspeed", *words]))


_CHECKPOINTING = {
    "checkpoint": pipe.recompute,
    "non_reentrant_checkpoint": pipe.recompute,
    "configure": configure_recomputing,
    "is_configured": lambda: True,
    "reset": lambda: None,
}
"""`deepspeed.checkpointing`."""
