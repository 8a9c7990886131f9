"""Converts the command line of `accelerate launch` into a plan and options of `shardwise launch`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import LaunchError
from shardwise.integrations.accelerate_parallelism import (
    MEGATRON,
    PARALLELISM,
    instead_of_megatron,
    instead_of_parallelism,
)

if TYPE_CHECKING:
    from shardwise.integrations.accelerate_config import AccelerateConfig

_FSDP = (
    "version", "offload_params", "min_num_params", "sharding_strategy", "reshard_after_forward", "auto_wrap_policy",
    "transformer_layer_cls_to_wrap", "backward_prefetch", "state_dict_type", "forward_prefetch", "use_orig_params",
    "cpu_ram_efficient_loading", "sync_module_states", "activation_checkpointing", "activation_checkpointing_offload",
)  # fmt: skip
_DEEPSPEED = (
    "deepspeed_config_file", "zero_stage", "offload_optimizer_device", "offload_param_device",
    "offload_optimizer_nvme_path", "offload_param_nvme_path", "gradient_clipping", "zero3_init_flag",
    "zero3_save_16bit_model", "deepspeed_moe_layer_cls_names",
)  # fmt: skip
_FP8 = (
    "backend", "margin", "interval", "format", "amax_history_len", "amax_compute_algo",
    "override_linear_precision", "opt_level", "enable_fsdp_float8_all_gather", "pad_inner_dim",
)  # fmt: skip
_FP8_EVALUATES = "use_autocast_during_eval"
"""The one option about fp8 that is a flag."""
_PLAIN = (
    "mixed_precision", "num_processes", "num_machines", "gpu_ids", "main_process_port", "gradient_accumulation_steps",
    "machine_rank", "main_process_ip", "rdzv_backend", "main_training_function", "downcast_bf16",
)  # fmt: skip
"""Options with the same names as in a file of `accelerate config`."""
_DYNAMO = ("dynamo_backend", "dynamo_mode")
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Booleans on a command line."""
_FLAGS = {
    "cpu": "use_cpu", "debug": "debug", "dynamo_use_fullgraph": "dynamo_use_fullgraph",
    "dynamo_use_dynamic": "dynamo_use_dynamic", "dynamo_use_regional_compilation": "dynamo_use_regional_compilation",
    "same_network": "same_network",
}  # fmt: skip
_REFUSED = {
    "tpu": "shardwise does not support TPUs.",
    "no_python": "ranks are Python processes. Start other programs with torchrun --no-python.",
}
_INSTEAD = {MEGATRON: instead_of_megatron, PARALLELISM: instead_of_parallelism}
"""Other engines, by what the names of their options begin with."""
_OTHER_HOSTS = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "mpirun_hostfile")
_WITHOUT_EFFECT = {
    "tee": "the output of ranks is always shown, and with --log_dir also written to files",
    "role": "ranks have no roles", "rdzv_conf": "ranks on one host need no rendezvous settings",
    "monitor_interval": "ranks are monitored continuously",
    "deepspeed_multinode_launcher": "ranks are started on this host",
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Add the options of `accelerate launch`, with underscores or hyphens, and the script. Of the many options of other
    engines those that are among `words` are added, to be refused by name."""

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **settings)

    option("config_file", type=Path, metavar="FILE", help="a file written by `accelerate config`")
    for name in (
        *_PLAIN,
        *_DYNAMO,
        *_DEEPSPEED,
        *(f"fsdp_{name}" for name in _FSDP),
        *(f"fp8_{name}" for name in _FP8),
    ):
        option(name, metavar="X", help="as in accelerate launch" if name in _PLAIN[:6] else argparse.SUPPRESS)
    names = [word.lstrip("-").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    for name in dict.fromkeys(name for name in names if name.startswith(tuple(_INSTEAD))):
        option(name, help=argparse.SUPPRESS)
    option("use_megatron_lm", action="store_true", help=argparse.SUPPRESS)
    option("use_parallelism_config", action="store_true", help=argparse.SUPPRESS)
    for name in (*_FLAGS, *_REFUSED, "multi_gpu", "enable_cpu_affinity", f"fp8_{_FP8_EVALUATES}"):
        option(name, action="store_true", help=argparse.SUPPRESS)
    option("use_deepspeed", action="store_true", help="ZeRO, set by --zero_stage or --deepspeed_config_file")
    option("use_fsdp", action="store_true", help="sharded, set by the options that begin with --fsdp_")
    for name in (*_OTHER_HOSTS, *_WITHOUT_EFFECT):
        option(name, help=argparse.SUPPRESS)
    option("num_cpu_threads_per_process", type=int, metavar="N", help="threads of each rank")
    option("max_restarts", type=int, metavar="N", help="restarts after a failure")
    option("log_dir", metavar="DIR", help="also write each rank's output to this folder")
    parser.add_argument("-m", "--module", action="store_true", help="run a module, like `python -m`")
    parser.add_argument("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script", help="the script, and its arguments")


def read_options(args: Any) -> tuple[AccelerateConfig, list[str]]:
    """The config that results from the options and the file, and the options for `shardwise launch`.

    Options override the file. Without `--config_file`, the default file of `accelerate config` is read. Raises
    `LaunchError` for unsupported options, and `ConfigError` for an invalid file.
    """
    for name, why in _REFUSED.items():
        if getattr(args, name):
            raise LaunchError(f"accelerate launch --{name} is not supported: {why}")
    for prefix, instead in _INSTEAD.items():
        given = {name: value for name, value in vars(args).items() if name.startswith(prefix) and value is not None}
        flag = f"use_{prefix.rstrip('_')}"
        if given or getattr(args, flag):
            named = next(iter(given), flag)
            raise LaunchError(f"accelerate launch --{named} is not supported: {instead(given)}")
    for name in _OTHER_HOSTS:
        if getattr(args, name):
            raise LaunchError(
                f"--{name} names other hosts, but this command starts ranks only on this host. Use shardwise launch "
                f"--hosts or --hostfile with --shardwise PLAN, or shardwise deepspeed --hostfile FILE."
            )
    from shardwise.integrations.accelerate_config import config_of, values_of  # which imports pydantic, unlike --help

    file = args.config_file or _default_file(args)
    values = {} if file is None else values_of(file)
    found = config_of(_merged(args, values), "accelerate launch")
    if file is not None and args.config_file is None:
        found.unsupported.insert(0, f"no --config_file: {file} is read")
    found.unsupported += [f"--{name}: {why}" for name, why in _WITHOUT_EFFECT.items() if getattr(args, name)]
    return found, _launch_options(args)


def _merged(args: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    merged |= {name: _read(getattr(args, name)) for name in _PLAIN if getattr(args, name) is not None}
    if args.gpu_ids is not None:
        merged["gpu_ids"] = args.gpu_ids
    merged |= {key: True for name, key in _FLAGS.items() if getattr(args, name)}
    merged |= {name: getattr(args, name) for name in _DYNAMO if getattr(args, name) is not None}
    fsdp = {f"fsdp_{name}": getattr(args, f"fsdp_{name}") for name in _FSDP}
    _merge_section(merged, "fsdp_config", fsdp)
    fp8 = {name: getattr(args, f"fp8_{name}") for name in _FP8}
    _merge_section(merged, "fp8_config", {**fp8, _FP8_EVALUATES: "true" if args.fp8_use_autocast_during_eval else None})
    _merge_section(merged, "deepspeed_config", {name: getattr(args, name) for name in _DEEPSPEED})
    chosen = {"FSDP": args.use_fsdp, "DEEPSPEED": args.use_deepspeed, "MULTI_GPU": args.multi_gpu}
    asked = [kind for kind, is_asked in chosen.items() if is_asked]
    if len(asked) > 1:
        raise LaunchError(f"{' and '.join(asked)} were requested together. Give only one of them.")
    kind = asked[0] if asked else str(merged.get("distributed_type", "MULTI_CPU" if args.cpu else "MULTI_GPU"))
    merged["distributed_type"] = kind
    if kind == "DEEPSPEED":
        merged.setdefault("deepspeed_config", {})
    return merged


def _merge_section(merged: dict[str, Any], section: str, options: Mapping[str, str | None]) -> None:
    given = {name: _read(value) for name, value in options.items() if value is not None}
    if given:
        merged[section] = {**(merged.get(section) or {}), **given}


def _read(text: str) -> Any:
    """A value of the command line: a number in decimal digits, a boolean, or the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _default_file(args: Any) -> Path | None:
    """The default file of `accelerate config`. Like Accelerate, ignores it with `--cpu`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    file = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    return file if file.is_file() and not args.cpu else None


def _launch_options(args: Any) -> list[str]:
    words: list[str] = []
    if args.num_cpu_threads_per_process is not None:
        words.append(f"--threads={args.num_cpu_threads_per_process}")
    if args.max_restarts is not None:
        words.append(f"--max-restarts={args.max_restarts}")
    if args.log_dir is not None:
        words.append(f"--log-dir={args.log_dir}")
    words += ["--bind=node"] if args.enable_cpu_affinity else []  # Accelerate's are all cores near the GPU
    words += ["--module"] if args.module else []
    return words
