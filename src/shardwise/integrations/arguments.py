"""Arguments of Transformers' Trainer that cannot be meant together with a plan."""

from __future__ import annotations

from typing import Any

from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.batches import copies_of_a_batch
from shardwise.integrations.hf_deepspeed import ASKED
from shardwise.integrations.plans import require_no_stages

_REFUSED = {
    "deepspeed": "DeepSpeed is another engine for what the plan does. Leave deepspeed out; the plan's preset zero1, "
    "zero2, zero3, zero3-offload or infinity is what its stages are. Or give the DeepSpeed config alone: shardwise "
    "launch --as-deepspeed train.py --deepspeed ds.json.",
    "fsdp": "FSDP is another engine for what the plan does. Leave fsdp and fsdp_config out; full_shard is zero3, "
    "shard_grad_op zero3-kept, hybrid_shard hsdp.",
    "parallelism_config": "A ParallelismConfig makes a device mesh of torch's own. Leave it out; the plan's mesh is in "
    "its place, and sequence_parallel_size of a DeepSpeed config in that of sp_size.",
    "auto_find_batch_size": "auto_find_batch_size tries again on the rank that ran out of memory alone. Give a batch "
    "size; engine.rehearse(batch), or shardwise explain, says what fits.",
    "bf16_full_eval": "bf16_full_eval casts the model, whose parameters lie where the plan says. Set bf16=True, or "
    "precision in the plan.",
    "fp16_full_eval": "fp16_full_eval casts the model, whose parameters lie where the plan says. Set fp16=True, or "
    "precision in the plan.",
    "use_vllm": "use_vllm reads weights on rank 0 alone, and they lie on all ranks. Leave it out: weights are gathered "
    "once for each round of generation.",
    "save_on_each_node": "save_on_each_node writes on several hosts, and rank 0 writes here. Take a folder that all "
    "hosts see.",
    "torch_compile_mode": "torch_compile_mode is for whole models, and a plan compiles its units one by one. Leave it "
    "out.",
}
_LAYERWISE = ("layerwise", "lomo")


def refuse_arguments(args: Any, plan: sw.Plan, model: nn.Module | None) -> None:
    """Raise `ConfigError` for `TrainingArguments` and models that belong to another engine, and for such plans."""
    require_no_stages(plan, "Trainer")
    if copies_of_a_batch(plan) > 1 and (hasattr(args, "num_generations") or args.eval_use_gather_object):
        raise ConfigError(
            "The plan's mesh has tp or sp, and trainers that generate, as eval_use_gather_object does, number samples "
            "by ranks. Take a mesh of data axes (dp, node, local)."
        )
    if (plan.mesh or {}).get("sp", 1) != 1 and getattr(args, "predict_with_generate", False):
        raise ConfigError(
            "The plan's mesh has sp, whose ranks share in the tokens of whole batches, and predict_with_generate makes "
            "one token after another. Set it to False, and generate inside trainer.engine.inference(), where each rank "
            "has whole sequences."
        )
    for name, why in _REFUSED.items():
        is_taken = name == "deepspeed" and hasattr(args, ASKED)
        if getattr(args, name, None) and not is_taken:
            raise ConfigError(why)
    optim = str(getattr(args.optim, "value", args.optim))
    if any(mark in optim for mark in _LAYERWISE):
        raise ConfigError(
            f"optim={optim} updates parameters inside of the backward, where their gradients are not summed over ranks "
            f"yet. Take one that steps afterwards, such as adamw_torch."
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"This one process sees {args.n_gpu} GPUs, which Trainer would use by DataParallel. Start one process for "
            f"each: shardwise launch train.py."
        )
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise ConfigError(
            "The model was sharded by from_pretrained(distributed_config=...) already. Load it without, and let the "
            "plan do it."
        )
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise ConfigError("The model was spread over devices by device_map. Load it without, and let the plan do it.")
