"""Converts a file written by `accelerate config` into a plan and launcher options."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import ConfigError, nearest
from shardwise.integrations.accelerate_fp8 import variables_of
from shardwise.integrations.accelerate_parallelism import instead_of_megatron, instead_of_parallelism, splits_in
from shardwise.integrations.deepspeed.config import read_config
from shardwise.plan.files.formats import SourceError
from shardwise.plan.files.yaml_text import read_plainly
from shardwise.system.safe_files import read_config_text

_STRATEGIES = {
    "FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero3-kept", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp",
    "1": "zero3", "2": "zero3-kept", "3": "ddp", "4": "hsdp", "TRUE": "zero3", "FALSE": "zero3-kept",
}  # fmt: skip
_OFFLOADED = {
    f"offload_{what}_{name}": (f"offload_{what}", name)
    for what in ("optimizer", "param")
    for name in ("device", "nvme_path")
}
_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "FSDP", "DEEPSPEED")
_PRECISIONS = ("fp16", "bf16", "fp8")
_OFF: tuple[Any, ...] = (None, False, "no", "none", "None", "NO", "", {}, 0)
_IGNORED = {
    "compute_environment", "num_machines", "downcast_bf16", "machine_rank", "main_training_function", "rdzv_backend",
    "same_network", "enable_cpu_affinity", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "main_process_ip",
    "fsdp_version", "fsdp_backward_prefetch", "fsdp_forward_prefetch", "fsdp_cpu_ram_efficient_loading",
    "fsdp_sync_module_states", "fsdp_use_orig_params", "fsdp_limit_all_gathers", "fsdp_state_dict_type",
    "zero3_init_flag", "zero3_save_16bit_model", "deepspeed_multinode_launcher",
}  # fmt: skip
"""Settings of other engines that have no meaning under a plan."""


@dataclass(frozen=True)
class Machines:
    """This host among several on which the same command runs, and the rendezvous of their ranks."""

    number: int
    rank: int
    address: str
    port: int
    backend: str
    """The backend of torchrun's rendezvous: `static`, or `c10d`."""


@dataclass
class AccelerateConfig:
    """The resulting plan and options; `unsupported` lists settings that a plan cannot express, with the reason."""

    plan: dict[str, Any] = field(default_factory=dict)
    nproc: int | None = None
    """The number of ranks on this host."""
    machines: Machines | None = None
    """`None` for a job on this host only."""
    port: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    names_deepspeed_config: bool = False
    """Whether the environment names a DeepSpeed config, for `--as-deepspeed`, and there is no plan."""
    unsupported: list[str] = field(default_factory=list)


def read_accelerate_config(path: Path) -> AccelerateConfig:
    """Read a file. Raises `ConfigError` if it is not a file of `accelerate config`, or contradicts itself."""
    return config_of(values_of(path), str(path))


def values_of(path: Path) -> dict[str, Any]:
    """The contents of a file. Raises `ConfigError` if it is not a file of `accelerate config`."""
    try:
        values = read_plainly(read_config_text(path))
    except (OSError, SourceError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a file of `accelerate config`: {error}") from error
    if not isinstance(values, dict) or "distributed_type" not in values:
        raise ConfigError(f"{path} has no distributed_type, so it is not a file of `accelerate config`.")
    return values


def config_of(values: Mapping[str, Any], where: str) -> AccelerateConfig:
    """Convert the values of a file or a command line. Raises `ConfigError` if they contradict each other."""
    kind = str(values["distributed_type"])
    if kind == "MEGATRON_LM":
        section = _section("megatron_lm_config", values.get("megatron_lm_config"))
        raise ConfigError(f"{where}: distributed_type {kind} is not supported: {instead_of_megatron(section)}")
    if kind not in _KINDS:
        raise ConfigError(f"{where}: distributed_type {kind} is not supported here. Known: {', '.join(_KINDS)}.")
    found = AccelerateConfig({"preset": "zero3" if kind == "FSDP" else "ddp"})  # FSDP shards by default
    try:
        for key, value in values.items():
            _take(found, str(key), value, kind)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if values.get("num_machines", 1) not in (None, 1, "1"):
        found.machines = _machines(values, found, where)
        found.nproc = (found.nproc or 0) // found.machines.number
    return found


def _machines(values: Mapping[str, Any], found: AccelerateConfig, where: str) -> Machines:
    number, rank = _integer(values, "num_machines", where), _integer(values, "machine_rank", where)
    address = values.get("main_process_ip")
    if not 0 <= rank < number:
        raise ConfigError(
            f"{where}: machine_rank is {rank}, but num_machines is {number}. Set it between 0 and {number - 1}."
        )
    if not address:
        raise ConfigError(f"{where}: num_machines is {number}. Also set main_process_ip, the address of machine 0.")
    if not found.nproc or found.nproc % number:
        counted = "missing" if found.nproc is None else found.nproc
        raise ConfigError(
            f"{where}: num_processes is {counted}. Set it to the number of ranks on all machines, a multiple of "
            f"{number}."
        )
    return Machines(number, rank, str(address), found.port or 29500, str(values.get("rdzv_backend") or "static"))


def _integer(values: Mapping[str, Any], key: str, where: str) -> int:
    try:
        return int(values.get(key, ""))
    except (TypeError, ValueError):
        given = f"is {values[key]!r}" if values.get(key) is not None else "is missing"
        raise ConfigError(f"{where}: {key} {given}. A job on several machines needs an integer.") from None


def _take(found: AccelerateConfig, key: str, value: Any, kind: str) -> None:
    if key in _VARIABLES:
        if key == "mixed_precision" and value not in _OFF and str(value).lower() not in _PRECISIONS:
            raise ConfigError(f"mixed_precision is {value!r}. {nearest(str(value), ('no', *_PRECISIONS))}")
        if value not in _OFF:
            found.environment[_VARIABLES[key]] = str(value).lower()
    elif key in ("fsdp_config", "deepspeed_config"):
        inner = _section(key, value)
        if key != f"{kind.lower()}_config":
            found.unsupported += [f"{key}.{name}: distributed_type is {kind}" for name in inner]
        elif key == "deepspeed_config":
            _take_deepspeed(found, inner)
        else:
            for name, one in inner.items():
                _take_fsdp(found, name if name.startswith("fsdp_") else f"fsdp_{name}", one)
    elif key == "fp8_config":
        found.environment |= variables_of(_section(key, value))
    elif key == "parallelism_config":
        asked = _section(key, value)
        if splits_in(asked):
            raise ConfigError(f"{key} is not supported: {instead_of_parallelism(asked)}")
    elif key == "num_processes":
        found.nproc = None if value is None else _whole(key, value)
    elif key == "main_process_port":
        found.port = None if value in _OFF else _whole(key, value)
    elif key == "gpu_ids":
        if value not in (*_OFF, "all"):
            found.environment["CUDA_VISIBLE_DEVICES"] = str(value)
    elif key == "dynamo_config":
        for name, one in _section(key, value).items():
            _take(found, name, one, kind)
    elif key != "distributed_type" and key not in _IGNORED and value not in _OFF:
        _refuse_slip(key, _TAKEN)
        found.unsupported.append(f"{key}: {value}")


def _section(key: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{key} is {value!r:.60}; give a mapping of its settings.")
    return {str(name): one for name, one in (value or {}).items()}


def _whole(key: str, value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise ConfigError(f"{key} is {value!r}; give a whole number.")
    return int(value)


def _refuse_slip(key: str, known: Iterable[str]) -> None:
    """Raise `ConfigError` for a name that is nearly one that counts; others are of another version of Accelerate."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    if close:
        raise ConfigError(f"unknown key {key!r}. Did you mean {close[0]!r}?")


_VARIABLES = {
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "use_cpu": "ACCELERATE_USE_CPU",
    "debug": "ACCELERATE_DEBUG_MODE",
    "dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}


_TAKEN = (
    *_VARIABLES, "fsdp_config", "deepspeed_config", "fp8_config", "dynamo_config", "num_processes", "num_machines",
    "machine_rank", "main_process_ip", "main_process_port", "gpu_ids", "distributed_type", "parallelism_config",
)  # fmt: skip
_FSDP_TAKEN = (
    "fsdp_sharding_strategy", "fsdp_reshard_after_forward", "fsdp_offload_params", "fsdp_min_num_params",
    "fsdp_transformer_layer_cls_to_wrap", "fsdp_auto_wrap_policy", "fsdp_activation_checkpointing",
)  # fmt: skip
_DEEPSPEED_TAKEN = ("deepspeed_config_file", "zero_stage", *_OFFLOADED, "gradient_clipping", *_VARIABLES)


def _take_fsdp(found: AccelerateConfig, key: str, value: Any) -> None:
    if key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        name = str(value).upper()
        if name not in _STRATEGIES:
            found.unsupported.append(f"{key}: {value} (known: {', '.join(_STRATEGIES)})")
        elif "offload" not in found.plan["preset"]:
            found.plan["preset"] = _STRATEGIES[name]
    elif key == "fsdp_offload_params":
        if value not in (*_OFF, "false"):
            found.plan["preset"] = "zero3-offload"
    elif key == "fsdp_transformer_layer_cls_to_wrap":
        _take_units(found, key, value, lambda name: {"class": name})
    elif key == "fsdp_min_num_params":
        _take_units(found, key, value, lambda count: {"min_numel": _whole(key, count)})
    elif key == "fsdp_activation_checkpointing":
        if value not in (*_OFF, "false"):
            found.plan["activations"] = "recompute"
    elif key == "fsdp_auto_wrap_policy":
        if value == "NO_WRAP":
            found.unsupported.append(f"{key}: {value} (units are blocks of the model)")
    elif key not in _IGNORED and value not in (*_OFF, "false"):
        _refuse_slip(key, _FSDP_TAKEN)
        found.unsupported.append(f"{key}: {value}")


def _take_units(found: AccelerateConfig, key: str, value: Any, rule: Callable[[str], dict[str, Any]]) -> None:
    names = str(value).split(",") if value not in _OFF else []
    if len(names) == 1:
        found.plan["units"] = rule(names[0].strip())
    elif names:
        found.unsupported.append(f"{key}: {value} (units: takes one class)")


def _take_deepspeed(found: AccelerateConfig, values: Mapping[str, Any]) -> None:
    """DeepSpeed's settings are read like a DeepSpeed config. Accelerate's default is stage 2."""
    file = values.get("deepspeed_config_file")
    if file not in _OFF:
        found.names_deepspeed_config = True
        found.plan = {}
        found.environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
        rest = set(values) - _IGNORED - {"deepspeed_config_file"}
        found.unsupported += [f"{key}: {values[key]} (the DeepSpeed config {file} counts)" for key in sorted(rest)]
        return
    zero: dict[str, Any] = {"stage": 2, "stage3_param_persistence_threshold": 0}
    for key, value in values.items():
        if key == "zero_stage":
            zero["stage"] = value
        elif key in _OFFLOADED:
            section, name = _OFFLOADED[key]
            if value not in _OFF:
                zero.setdefault(section, {})[name] = value
        elif key in _VARIABLES:
            _take(found, key, value, "DEEPSPEED")
        elif key == "gradient_clipping" and value not in _OFF:
            found.unsupported.append(f"{key}: {value} (the script clips: accelerator.clip_grad_norm_)")
        elif key not in _IGNORED and value not in (*_OFF, "none"):
            _refuse_slip(key, _DEEPSPEED_TAKEN)
            found.unsupported.append(f"{key}: {value}")
    plan = read_config({"zero_optimization": zero, "gradient_clipping": 0}, world_size=1).plan
    found.plan |= {key: value for key, value in plan.items() if key != "resident_below"}
