"""Refuses arguments of Transformers' Trainer that contradict a plan."""

from __future__ import annotations

from typing import Any

from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.accelerate_batches import ranks_per_batch
from shardwise.integrations.hf_deepspeed import CONFIG_ATTRIBUTE
from shardwise.integrations.trl_shared_prompts import generates, require_known

_REFUSED = {
    "deepspeed": "DeepSpeed and the plan both configure an engine. Leave deepspeed out: its stages are the plan's "
    "presets zero1, zero2, zero3, zero3-offload and infinity. Or give only the DeepSpeed config: shardwise launch "
    "--as-deepspeed train.py --deepspeed ds.json.",
    "fsdp": "FSDP and the plan both configure an engine. Leave fsdp and fsdp_config out: full_shard is the preset "
    "zero3, shard_grad_op zero3-kept, hybrid_shard hsdp.",
    "parallelism_config": "A ParallelismConfig creates a device mesh of torch. Leave it out, and use the plan's mesh; "
    "instead of sp_size, use sequence_parallel_size of a DeepSpeed config.",
    "auto_find_batch_size": "auto_find_batch_size retries only on the rank that ran out of memory. Set a batch size; "
    "engine.rehearse(batch) or shardwise explain shows what fits.",
    "bf16_full_eval": "bf16_full_eval casts the whole model, but its parameters are sharded. Set bf16=True, or "
    "precision in the plan.",
    "fp16_full_eval": "fp16_full_eval casts the whole model, but its parameters are sharded. Set fp16=True, or "
    "precision in the plan.",
    "save_on_each_node": "save_on_each_node writes on several hosts, but here only rank 0 writes. Use a folder that "
    "all hosts share.",
    "torch_compile_mode": "torch_compile_mode is for whole models, but the engine compiles each unit separately. Leave "
    "it out.",
}
_LAYERWISE = ("layerwise", "lomo")


def refuse_arguments(args: Any, plan: sw.Plan, model: nn.Module | None) -> None:
    """Raise `ConfigError` for `TrainingArguments`, models and plans that cannot be used with our Trainer."""
    if ranks_per_batch(plan) > 1 and generates(args):
        require_known(args, plan)
    if (plan.mesh or {}).get("sp", 1) != 1 and getattr(args, "predict_with_generate", False):
        raise ConfigError(
            "The plan's mesh has sp, which splits the tokens of a batch over ranks, but predict_with_generate produces "
            "one token at a time. Set it to False, and generate inside trainer.engine.inference(), where each rank has "
            "whole sequences."
        )
    for name, why in _REFUSED.items():
        is_taken = name == "deepspeed" and hasattr(args, CONFIG_ATTRIBUTE)
        if getattr(args, name, None) and not is_taken:
            raise ConfigError(why)
    optim = str(getattr(args.optim, "value", args.optim))
    if any(mark in optim for mark in _LAYERWISE):
        raise ConfigError(
            f"optim={optim} updates parameters during the backward, before their gradients are summed over ranks. Use "
            f"an optimizer that steps afterwards, such as adamw_torch."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"This process sees {args.n_gpu} GPUs, which Trainer would use with DataParallel. Start one process per "
            f"GPU: shardwise launch train.py."
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            "The model was already sharded by from_pretrained(distributed_config=...). Load it without this argument; "
            "the plan shards it."
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError(
            "The model was distributed over devices by device_map. Load it without this argument; the plan places it."
        )
