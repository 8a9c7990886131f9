"""Combines a plan with the settings of Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.plans import refuse_elastic_job, require_agreement, resolved_plan, without
from shardwise.plan.comm_hooks import instead_of_hook, name_of, settings_of

PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept", "hsdp", "hpz", "offload", "zero3-offload", "infinity")
NAMES = (*PRESETS, "auto")
_OURS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
_OURS |= {"precision", "process_group_backend", "timeout", "start_method"}
PRECISIONS = {"32-true": "no", "bf16-true": "bf16", "bf16-mixed": "bf16", "16-true": "fp16", "16-mixed": "fp16"}
FOR_FP8 = " For fp8 (Lightning's transformer-engine), use bf16-mixed, and set fp8: tensorwise in the plan."


def names_and_plans() -> dict[str, str]:
    """Presets by strategy name. The names have underscores, because Lightning allows no hyphens:
    `shardwise_zero3_kept`."""
    return {f"shardwise_{preset.replace('-', '_')}": preset for preset in NAMES}


def refuse_settings(state_dict_type: str, settings: dict[str, Any]) -> None:
    """Raise `ConfigError` for an unknown `state_dict_type`, for arguments of a strategy that belong to torch's
    DistributedDataParallel, and in an elastic job, which no argument changes."""
    refuse_elastic_job("Lightning")
    if state_dict_type not in ("sharded", "full"):
        raise ConfigError(f"state_dict_type is {state_dict_type!r}. Use 'sharded' or 'full'.")
    for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
        if (hook := settings.get(name)) is not None:
            cure = instead_of_hook(name_of(hook), settings_of(settings.get("ddp_comm_state")))
            raise ConfigError(
                f"{name} is {name_of(hook)}, a hook of DistributedDataParallel, which does not wrap a sharded model. "
                f"Leave it out, with its state, and {cure}."
            )
    for name in settings:
        if name not in _OURS:
            raise ConfigError(
                f"{name}= is for DistributedDataParallel, but shardwise uses a plan instead. Leave {name} out; "
                f"parameters without gradients and changing graphs need no setting."
            )
    method = settings.get("start_method", "popen")
    if method != "popen":
        raise ConfigError(
            f"start_method={method!r} starts ranks that end with the training, and passes whole weights to the parent "
            f"process. Leave it out: Lightning then starts the script once per rank, as shardwise launch and torchrun "
            f"do."
        )


def require_staged_settings(plan: sw.Plan, state_dict_type: str) -> None:
    """Raise `ConfigError` for what a plan with pipeline stages cannot be combined with."""
    if (plan.mesh or {}).get("sp", 1) != 1:
        raise ConfigError(
            "The plan's mesh has pp and sp, but Lightning's steps call what is in the module that is sharded, of which "
            "only calls as a whole split sequences. Leave one of them out, or use Trainer of Transformers, or Fabric."
        )
    if state_dict_type == "full":
        raise ConfigError(
            "state_dict_type='full' writes the optimizer's whole states into one file, but the plan's mesh has pp, and "
            "each pipeline stage has its own. Leave it out: folders resume with any plan, on one rank too. For the "
            "weights alone: trainer.save_checkpoint(path, weights_only=True)."
        )


def plan_for(plan: sw.Plan, trainer: Any, model: nn.Module, precision: str) -> sw.Plan:
    """The plan of one run, with unset fields from the Trainer, and without those that the Trainer handles itself.

    Raises `ConfigError` if plan and Trainer contradict each other.
    """
    require_agreement(
        plan, "accumulate", plan.accumulate, trainer.accumulate_grad_batches, "accumulate_grad_batches of Trainer"
    )
    clips_norm = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) != "value"
    require_agreement(
        plan, "clip_grad_norm", plan.clip_grad_norm, trainer.gradient_clip_val if clips_norm else None,
        "gradient_clip_val of Trainer",
    )  # fmt: skip
    if getattr(model, "_compiler_ctx", None) is not None:
        raise ConfigError(
            "The LightningModule was passed to torch.compile, which compiles whole steps. Pass the original module, "
            "and set compile in the plan, which compiles each unit separately."
        )
    if precision not in PRECISIONS:
        raise ConfigError(f"precision {precision!r} is not supported. Use {', '.join(map(repr, PRECISIONS))}.{FOR_FP8}")
    return resolved_plan(without(plan, "accumulate", "clip_grad_norm"), model, PRECISIONS[precision], None, "Lightning")


def rank_environment(strategy: Any) -> dict[str, str]:
    """The environment variables with which this rank joins its world. Lightning does not set all of them."""
    device = strategy.root_device
    return {
        **os.environ,
        "RANK": str(strategy.global_rank),
        "WORLD_SIZE": str(strategy.world_size),
        "LOCAL_RANK": str(strategy.local_rank if device.index is None else device.index),
        "LOCAL_WORLD_SIZE": str(strategy.num_processes),
    }
