"""What users of other libraries write, and where a plan says it: for the hints of errors.

The nearest name is no help there: of our keys, `stage` resembles `storage` most.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwise.errors import nearest

_DEEPSPEED = "`shardwise convert ds_config.json plan.yaml` makes a plan of a DeepSpeed config"
_PRESET = "Name a preset instead, such as preset: zero3"
_PRECISION = "Write precision: bf16, or fp16"
_MESH = "Give the mesh that axis: mesh: {dp: -1, tp: 2}"
_SCRIPT = "That is the script's: give the optimizer to shard()"
_BATCH = "The script makes its batches; of micro-batches per step a plan says accumulate: 4"

_KEYS = {
    **dict.fromkeys(("stage", "zero_stage", "zero", "zero_optimization"), f"{_PRESET}; {_DEEPSPEED}"),
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version", "sharding_strategy", "strategy"), _PRESET),
    **dict.fromkeys(("fp16", "bf16", "fp32", "bfloat16", "mixed_precision", "amp", "dtype"), _PRECISION),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "batch_size"), f"{_BATCH}; {_DEEPSPEED}"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "Write accumulate: 4"),
    **dict.fromkeys(("gradient_clipping", "gradient_clip_val", "max_grad_norm"), "Write clip_grad_norm: 1.0"),
    **dict.fromkeys(("optimizer", "scheduler", "lr", "learning_rate", "weight_decay"), _SCRIPT),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing", "fsdp_activation_checkpointing", "recompute"),
        "Write activations: recompute",
    ),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_param"), "Write preset: offload, or zero3-offload"),
    **dict.fromkeys(("torch_compile", "use_torch_compile", "dynamo_backend"), "Write compile: inductor"),
    **dict.fromkeys(
        (
            *("tp", "pp", "dp", "sp", "ep", "tp_size", "pp_size", "dp_size", "cp_size"),
            *("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
            *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
        ),
        _MESH,
    ),
    **dict.fromkeys(("wandb", "tensorboard", "mlflow", "report_to"), "Write trackers: [wandb], and run: for a folder"),
}
_RENAMED = {
    **dict.fromkeys(("float8", "quantize", "fp8_format", "fp8_recipe"), "fp8"),
    "recipe_name": "recipe",
    "filter_fqns": "skip",
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_step",
    "min_compression_rate": "min_rate",
    "random_seed": "seed",
    "sync_every": "every",
    "outer_optimizer": "optimizer",
    "fragment_sync_delay": "overlap",
    "fragment_update_alpha": "mix",
    "should_quantize": "wire",
}
"""Keys of torchtitan, Megatron-LM, torch's PowerSGD and torchft's DiLoCo, and what they are called in a plan."""
_PRESETS = {
    **dict.fromkeys(("fsdp", "fsdp2", "full_shard", "fully_shard", "deepspeed", "stage3", "zero_stage_3"), "zero3"),
    **dict.fromkeys(("stage2", "zero_stage_2"), "zero2"),
    **dict.fromkeys(("stage1", "zero_stage_1"), "zero1"),
    "shard_grad_op": "zero3-kept",
    "hybrid_shard": "hsdp",
    **dict.fromkeys(("no_shard", "dp", "none", "horovod"), "ddp"),
    **dict.fromkeys(("zero2-offload", "zero_offload", "cpu_offload"), "offload"),
}
_FP8 = "layers that multiply in 8 bits are set by fp8, such as fp8: rowwise, beside precision: bf16"
_SIGNS = "signs are what an optimizer sends: sw.optim.OneBitAdam, ZeroOneAdam or OneBitLamb, with preset: ddp"
_VALUES = {
    ("precision", "fp8"): _FP8,
    ("precision", "transformer-engine"): _FP8,
    ("wire.grad.dtype", "sign"): _SIGNS,
}
"""By the path of a key, and what was written there."""
_AXES = ("tp", "pp", "sp", "ep", "3d", "megatron")


def hint_for_key(key: str, known: Collection[str]) -> str:
    """What to write in the place of an unknown key of a plan, or of one of its sections, which has `known` ones."""
    if (ours := _RENAMED.get(key)) in known:
        return f"Here it is called {ours!r}."
    cure = _KEYS.get(key.lower()) if "preset" in known else None
    return f"{cure}." if cure else nearest(key, known)


def hint_for_value(path: str, value: object) -> str | None:
    """What to write in the place of a value that no key at `path` takes."""
    return _VALUES.get((path, value)) if isinstance(value, str) else None


def hint_for_preset(name: str, known: Collection[str]) -> str:
    """What to write in the place of an unknown preset."""
    word = name.strip().lower()
    if word in _AXES:
        return "Model parallelism is an axis of the mesh, under any preset: preset: zero1, mesh: {dp: -1, tp: 2}."
    meant = _PRESETS.get(word)
    return f"Did you mean {meant!r}?" if meant else nearest(name, known)
