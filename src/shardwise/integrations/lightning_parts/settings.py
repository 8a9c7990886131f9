"""What a Trainer of Lightning and a plan say about the same things."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.plans import require_agreement, settled, without

PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept", "hsdp", "hpz", "offload", "zero3-offload", "infinity")
_OURS = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}
_OURS |= {"precision", "process_group_backend", "timeout", "start_method"}
PRECISIONS = {"32-true": "no", "bf16-true": "bf16", "bf16-mixed": "bf16", "16-true": "fp16", "16-mixed": "fp16"}


def names_and_plans() -> dict[str, str]:
    """The plan that counts under a name of a strategy, in which Lightning knows no hyphens: `shardwise_zero3_kept`."""
    return {f"shardwise_{preset.replace('-', '_')}": preset for preset in PRESETS}


def refuse_settings(settings: dict[str, Any]) -> None:
    """Raise `ConfigError` for arguments of a strategy that belong to torch's DistributedDataParallel."""
    for name in settings:
        if name not in _OURS:
            raise ConfigError(
                f"{name}= is for DistributedDataParallel, and a plan is in its place. Leave {name} out; parameters "
                f"that get no gradient, and graphs that change, need no setting here."
            )
    method = settings.get("start_method", "popen")
    if method != "popen":
        raise ConfigError(
            f"start_method={method!r} starts ranks that rank 0 alone takes the weights from in the end. Leave it out, "
            f"and run the script itself: Lightning starts it once for each rank, as `shardwise launch` and torchrun do."
        )


def plan_for(plan: sw.Plan, trainer: Any, model: nn.Module, precision: str) -> sw.Plan:
    """The plan of one run: what it leaves open comes from the Trainer, and what the Trainer does itself is taken out.

    Raises `ConfigError` where the two contradict each other.
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
            "The LightningModule was given to torch.compile, which compiles whole steps. Give the module itself, and "
            "say compile in the plan: units are compiled one by one."
        )
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}, which no plan has. Take {', '.join(map(repr, PRECISIONS))}.")
    return settled(without(plan, "accumulate", "clip_grad_norm"), model, PRECISIONS[precision], None, "Lightning")


def places(strategy: Any) -> dict[str, str]:
    """The environment by which this rank finds its world: Lightning does not set all of it."""
    device = strategy.root_device
    return {
        **os.environ,
        "RANK": str(strategy.global_rank),
        "WORLD_SIZE": str(strategy.world_size),
        "LOCAL_RANK": str(strategy.local_rank if device.index is None else device.index),
        "LOCAL_WORLD_SIZE": str(strategy.num_processes),
    }
