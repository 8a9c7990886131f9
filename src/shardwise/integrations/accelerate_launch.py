"""What people type after `accelerate launch`, as what a file of `accelerate config` says, and words for ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import LaunchError
from shardwise.integrations.accelerate_config import AccelerateConfig, config_of, values_of

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
_PLAIN = (
    "mixed_precision", "num_processes", "num_machines", "gpu_ids", "main_process_port", "gradient_accumulation_steps",
    "machine_rank", "main_process_ip", "rdzv_backend", "main_training_function", "downcast_bf16",
)  # fmt: skip
"""Which a file has under the same names."""
_DYNAMO = ("dynamo_backend", "dynamo_mode")
_FLAGS = {
    "cpu": "use_cpu", "debug": "debug", "dynamo_use_fullgraph": "dynamo_use_fullgraph",
    "dynamo_use_dynamic": "dynamo_use_dynamic", "dynamo_use_regional_compilation": "dynamo_use_regional_compilation",
    "same_network": "same_network",
}  # fmt: skip
_REFUSED = {
    "tpu": "there are no TPUs here.",
    "use_megatron_lm": "a plan with tp, sp or ep in its mesh is in its place: shardwise launch --shardwise PLAN. "
    "Stages (pp) need a loop that calls engine.train_step(batch).",
    "use_parallelism_config": "the mesh of a plan is in its place: shardwise launch --shardwise PLAN.",
    "no_python": "ranks are processes of Python. Start other programs with torchrun --no-python.",
}
_ELSEWHERE = ("deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter", "mpirun_hostfile")
_MEANINGLESS = {
    "tee": "what ranks print comes here, and with --log_dir into files too",
    "role": "ranks have no roles", "rdzv_conf": "ranks of one host meet by themselves",
    "monitor_interval": "ranks are watched all the time",
    "deepspeed_multinode_launcher": "ranks are started on this host",
}  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `accelerate launch`, each with hyphens too, and the script behind them."""

    def option(name: str, **settings: Any) -> None:
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), **settings)

    option("config_file", type=Path, metavar="FILE", help="what `accelerate config` has written")
    for name in (*_PLAIN, *_DYNAMO, *_DEEPSPEED, *(f"fsdp_{name}" for name in _FSDP)):
        option(name, metavar="X", help="as of accelerate launch" if name in _PLAIN[:6] else argparse.SUPPRESS)
    for name in (*_FLAGS, *_REFUSED, "multi_gpu", "enable_cpu_affinity"):
        option(name, action="store_true", help=argparse.SUPPRESS)
    option("use_deepspeed", action="store_true", help="ZeRO, as --zero_stage or --deepspeed_config_file say")
    option("use_fsdp", action="store_true", help="sharded, as the options say that begin with --fsdp_")
    for name in (*_ELSEWHERE, *_MEANINGLESS):
        option(name, help=argparse.SUPPRESS)
    option("num_cpu_threads_per_process", type=int, metavar="N", help="threads of each rank")
    option("max_restarts", type=int, metavar="N", help="new attempts after a failure")
    option("log_dir", metavar="DIR", help="also write each rank's output there")
    parser.add_argument("-m", "--module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script", help="the script, and its arguments")


def understood(args: Any) -> tuple[AccelerateConfig, list[str]]:
    """What the options and the file come to, and words for `shardwise launch`.

    Options count more than the file, which is that of `accelerate config` in its usual place if none is named. Raises
    `LaunchError` for what is refused by name, and `ConfigError` for what a file is refused for.
    """
    for name, why in _REFUSED.items():
        if getattr(args, name):
            raise LaunchError(f"accelerate launch --{name} is not supported: {why}")
    for name in _ELSEWHERE:
        if getattr(args, name):
            raise LaunchError(
                f"--{name} is about other hosts, and these ranks start on this one. Name hosts to shardwise launch "
                f"(--hosts, --hostfile) with --shardwise PLAN, or to shardwise deepspeed --hostfile FILE."
            )
    file = args.config_file or _usual_file(args)
    values = {} if file is None else values_of(file)
    found = config_of(_merged(args, values), "accelerate launch")
    if file is not None and args.config_file is None:
        found.not_understood.insert(0, f"no --config_file: {file} is read")
    found.not_understood += [f"--{name}: {why}" for name, why in _MEANINGLESS.items() if getattr(args, name)]
    return found, _words(args)


def _merged(args: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    merged |= {name: _read(getattr(args, name)) for name in _PLAIN if getattr(args, name) is not None}
    if args.gpu_ids is not None:
        merged["gpu_ids"] = args.gpu_ids
    merged |= {key: True for name, key in _FLAGS.items() if getattr(args, name)}
    merged |= {name: getattr(args, name) for name in _DYNAMO if getattr(args, name) is not None}
    fsdp = {f"fsdp_{name}": getattr(args, f"fsdp_{name}") for name in _FSDP}
    _put(merged, "fsdp_config", fsdp)
    _put(merged, "deepspeed_config", {name: getattr(args, name) for name in _DEEPSPEED})
    chosen = {"FSDP": args.use_fsdp, "DEEPSPEED": args.use_deepspeed, "MULTI_GPU": args.multi_gpu}
    asked = [kind for kind, is_asked in chosen.items() if is_asked]
    if len(asked) > 1:
        raise LaunchError(f"{' and '.join(asked)} are asked for at once. Give one of --use_fsdp, --use_deepspeed.")
    kind = asked[0] if asked else str(merged.get("distributed_type", "MULTI_CPU" if args.cpu else "MULTI_GPU"))
    merged["distributed_type"] = kind
    sharding = {"fsdp_sharding_strategy", "fsdp_reshard_after_forward"}
    if kind == "FSDP" and not sharding & set(merged.get("fsdp_config") or {}):
        merged["fsdp_config"] = {"fsdp_reshard_after_forward": True, **(merged.get("fsdp_config") or {})}
    if kind == "DEEPSPEED":
        merged.setdefault("deepspeed_config", {})
    return merged


def _put(merged: dict[str, Any], section: str, options: Mapping[str, str | None]) -> None:
    given = {name: _read(value) for name, value in options.items() if value is not None}
    if given:
        merged[section] = {**(merged.get(section) or {}), **given}


def _read(text: str) -> Any:
    """A word of the command line, as a file has it: a number, true or false, or itself."""
    value = yaml.safe_load(text) if text else text
    return value if isinstance(value, bool | int | float) else text


def _usual_file(args: Any) -> Path | None:
    """Where `accelerate config` writes; not read with `--cpu`, as by Accelerate."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    file = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    return file if file.is_file() and not args.cpu else None


def _words(args: Any) -> list[str]:
    words: list[str] = []
    if args.num_cpu_threads_per_process is not None:
        words.append(f"--threads={args.num_cpu_threads_per_process}")
    if args.max_restarts is not None:
        words.append(f"--max-restarts={args.max_restarts}")
    if args.log_dir is not None:
        words.append(f"--log-dir={args.log_dir}")
    words += ["--bind=cores"] if args.enable_cpu_affinity else []
    words += ["--module"] if args.module else []
    return words
