"""What each field of a `ds_config.json` becomes: names and defaults as in DeepSpeed 0.19.

A field is honoured, not needed here, had elsewhere, or refused where it is set to anything but its default. Where
DeepSpeed is installed, tests/extras/test_deepspeed_facts.py compares names and defaults with its own classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Fate(Enum):
    """What becomes of a field, in the words of a report."""

    HONOURED = "honoured"
    NOT_NEEDED = "not needed"
    ELSEWHERE = "had elsewhere"
    REFUSED = "refused"
    UNKNOWN = "not understood"
    AUTO = "left to the script"


@dataclass(frozen=True)
class Field:
    """One field: what it is without being set, what becomes of it, and why."""

    default: object
    fate: Fate
    why: str = ""


def _all(fate: Fate, why: str, **defaults: object) -> dict[str, Field]:
    return {name: Field(default, fate, why) for name, default in defaults.items()}


def _within(section: str, fields: Mapping[str, Field]) -> dict[str, Field]:
    return {f"{section}.{name}": field for name, field in fields.items()}


_BUCKETS = "what is due at one moment is sent then; there are no buckets to size"
_PREFETCH = "how far gathers run ahead is prefetch_bytes; parameters are freed after their last use"
_HONOURED = Fate.HONOURED
_NOT_NEEDED = Fate.NOT_NEEDED
_ELSEWHERE = Fate.ELSEWHERE
_REFUSED = Fate.REFUSED

_TOP = {
    **_all(_HONOURED, "", train_batch_size=None, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None),
    **_all(_HONOURED, "", gradient_clipping=1.0, sequence_parallel_size=1, steps_per_print=None),
    **_all(_HONOURED, "the dtype of gradients on the wire", communication_data_type=None),
    **_all(
        _NOT_NEEDED,
        "any optimizer that works element by element is taken, and others are refused by name",
        zero_allow_untested_optimizer=False,
        zero_force_ds_cpu_optimizer=True,
    ),
    **_all(
        _NOT_NEEDED,
        "sums are taken in at least the dtype of the gradients, and divided once",
        prescale_gradients=False,
        gradient_predivide_factor=1.0,
        seq_parallel_communication_data_type="fp32",
    ),
    **_all(_NOT_NEEDED, "gathers are as the table says", disable_allgather=False),
    **_all(_NOT_NEEDED, "it changes nothing that is computed", vocabulary_size=None, disable_python_gc=False),
    **_all(_NOT_NEEDED, "the mesh has one order of axes", data_parallel_size=None),
    **_all(
        _ELSEWHERE,
        "engine.timeline(path) and engine.memory() have it",
        wall_clock_breakdown=False,
        memory_breakdown=False,
        dump_state=False,
        log_level=None,
    ),
    **_all(_ELSEWHERE, "give the loader drop_last", dataloader_drop_last=False),
    **_all(_REFUSED, "gradients are averaged; multiply the loss by the number of ranks", gradient_allreduce_op="mean"),
    **_all(_REFUSED, "embedding gradients are dense here", sparse_gradients=False),
    **_all(_REFUSED, "there are no CUDA graphs of whole steps", graph_harvesting=False),
    **_all(
        _REFUSED,
        "a step is every gradient_accumulation_steps backwards; for another rhythm use shardwise's own engine",
        managed_gradient_accumulation=True,
    ),
    **_all(_REFUSED, "experts lie over the data axis `ep`", use_data_before_expert_parallelism=False),
}

_OPTIMIZER = {
    **_all(_HONOURED, "", type=None, params=None),
    **_all(_NOT_NEEDED, "one implementation for all ranks", legacy_fusion=False),
}
_SCHEDULER = _all(_HONOURED, "", type=None, params=None)

_FP16 = {
    **_all(
        _HONOURED,
        "",
        enabled=False,
        loss_scale=0,
        initial_scale_power=16,
        loss_scale_window=1000,
        hysteresis=2,
        min_loss_scale=1,
    ),
    **_all(_REFUSED, "inputs keep their dtype; cast them in the script", auto_cast=False),
    **_all(
        _REFUSED,
        "chances for overflows come back when the scale doubles",
        consecutive_hysteresis=False,
    ),
    **_all(_REFUSED, "masters and their gradients are fp32", fp16_master_weights_and_grads=False),
}
_BF16 = {
    **_all(_HONOURED, "", enabled=False),
    **_all(_NOT_NEEDED, "an overflow shows in the gradient norm", check_grad_overflow=True),
    **_all(_NOT_NEEDED, "gradients are taken as they come", immediate_grad_update=False),
    **_all(
        _REFUSED,
        'masters are fp32; for states in bf16 use shardwise.optim.AdamW(state_dtype="bf16")',
        bf16_master_weights_and_grads=False,
        bf16_optimizer_states=False,
    ),
}

_ZERO = {
    **_all(
        _HONOURED,
        "",
        stage=0,
        offload_param=None,
        offload_optimizer=None,
        stage3_prefetch_bucket_size=50_000_000,
        stage3_param_persistence_threshold=100_000,
        zero_hpz_partition_size=1,
        mics_shard_size=-1,
        cpu_offload=None,
        cpu_offload_param=None,
    ),
    **_all(
        _NOT_NEEDED,
        _BUCKETS,
        reduce_bucket_size=500_000_000,
        allgather_bucket_size=500_000_000,
        use_multi_rank_bucket_allreduce=True,
        contiguous_gradients=True,
        reduce_scatter=True,
        allgather_partitions=True,
        round_robin_gradients=False,
        stage3_use_all_reduce_for_fetch_params=False,
        stage3_allgather_sequential=False,
        mics_hierarchical_params_gather=False,
        parameter_alignment=False,
    ),
    **_all(
        _NOT_NEEDED,
        _PREFETCH,
        stage3_max_live_parameters=1_000_000_000,
        stage3_max_reuse_distance=1_000_000_000,
        stage3_module_granularity_threshold=0,
        stage3_model_persistence_threshold=None,
        overlap_comm=None,
    ),
    **_all(_NOT_NEEDED, "the update goes by units", sub_group_size=1_000_000_000),
    **_all(_NOT_NEEDED, "units are gathered whole, whatever a rank's data makes of them", leaf_module=None),
    **_all(
        _NOT_NEEDED,
        "checkpoints move between world sizes as they are",
        elastic_checkpoint=False,
        load_from_fp32_weights=True,
        legacy_stage1=False,
        pipeline_loading_checkpoint=False,
    ),
    **_all(
        _NOT_NEEDED,
        "engine.save_pretrained and save_16bit_model write whole weights, unit by unit",
        stage3_gather_16bit_weights_on_model_save=False,
        stage3_gather_fp16_weights_on_model_save=False,
    ),
    **_all(_NOT_NEEDED, "parameters without a gradient are agreed on in each step", ignore_unused_parameters=True),
    **_all(
        _NOT_NEEDED,
        "nothing of torch is replaced",
        memory_efficient_linear=True,
        override_module_apply=True,
        log_trace_cache_warnings=False,
        enable_sanity_checks=False,
        save_muon_momentum_buffer_in_memory=False,
        cpu_offload_use_pin_memory=None,
        compute_grad_norm=True,
    ),
    **_all(
        _REFUSED,
        "values travel in their own dtype; wire.grad: bf16 halves gradients",
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
        zeropp_loco_param=None,
    ),
    **_all(_REFUSED, "ZenFlow changes the update rule", zenflow=None),
}
_BUFFERS = "buffers are as many and as large as the units need"
_OFFLOAD_PARAM = {
    **_all(_HONOURED, "", device="none", nvme_path=None),
    **_all(_NOT_NEEDED, _BUFFERS, buffer_count=5, buffer_size=100_000_000, max_in_cpu=1_000_000_000, pin_memory=True),
}
_OFFLOAD_OPTIMIZER = {
    **_all(_HONOURED, "", device="none", nvme_path=None, ratio=1.0),
    **_all(
        _NOT_NEEDED,
        _BUFFERS,
        buffer_count=4,
        pin_memory=True,
        pipeline_read=False,
        pipeline_write=False,
        fast_init=False,
        cpuadam_cores_perc=0.8,
    ),
    **_all(_REFUSED, "SuperOffload is for one kind of machine", super_offload=False),
}

_TENSOR_PARALLEL = {
    **_all(_HONOURED, "", autotp_size=None, **{"tp.tp_size": 1}),
    **_all(_NOT_NEEDED, "the plan's precision", dtype="fp16"),
    **_all(_NOT_NEEDED, "groups follow from the mesh", **{"tp.tp_grain_size": 1, "tp.mpu": None, "tp.tp_group": None}),
    **_all(_NOT_NEEDED, "sums are sent as they are ready", tp_overlap_comm=False),
    **_all(_NOT_NEEDED, "models begin on the host or without values", keep_module_on_host=False),
    **_all(
        _REFUSED,
        "say tensor: {plan: ...} in a plan of shardwise",
        injection_policy_tuple=None,
        partition_config=None,
        preset_model=None,
        replace_with_kernel_inject=False,
        vocab_parallel_lm_head=None,
        vocab_parallel_ce_backend="torch",
    ),
}

_DATA_TYPES = {
    **_all(_HONOURED, "", grad_accum_dtype=None),
    **_all(_REFUSED, "parameters take the plan's precision", param_dtype=None),
    **_all(_REFUSED, "buffers keep their dtype", buffer_dtype=None),
    **_all(_REFUSED, "say rules: {...: {classes: [...], precision: fp32}} in a plan", keep_in_fp32_modules="auto"),
}

_ELASTICITY = {
    **_all(
        _HONOURED,
        "",
        enabled=False,
        max_train_batch_size=2000,
        micro_batch_sizes=[2, 4, 6],
        min_gpus=1,
        max_gpus=10000,
        version=0.2,
        prefer_larger_batch=True,
        num_gpus_per_node=1,
        model_parallel_size=1,
        ignore_non_elastic_batch_info=False,
    ),
    **_all(_NOT_NEEDED, "ranks that live go on at once; `shardwise launch --elastic`", min_time=0),
}

_JOB = _all(_HONOURED, "", enabled=False, output_path="", job_name="DeepSpeedJobName")
MONITORS = {
    "tensorboard": _JOB,
    "csv_monitor": _JOB,
    "wandb": _all(_HONOURED, "", enabled=False, group=None, team=None, project="deepspeed"),
    "comet": _all(
        _HONOURED,
        "",
        enabled=False,
        samples_log_interval=100,
        project=None,
        workspace=None,
        api_key=None,
        experiment_name=None,
        experiment_key=None,
        online=None,
        mode=None,
    ),
}
"""Sections that say who is told of the training: see `monitor.py`."""

_PARALLEL_WRITE = {"parallel_write.pipeline_stage": False}
_SECTIONS = {
    "optimizer": _OPTIMIZER,
    "scheduler": _SCHEDULER,
    "fp16": _FP16,
    "bf16": _BF16,
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": _OFFLOAD_PARAM,
    "zero_optimization.offload_optimizer": _OFFLOAD_OPTIMIZER,
    "tensor_parallel": _TENSOR_PARALLEL,
    "data_types": _DATA_TYPES,
    "elasticity": _ELASTICITY,
    **MONITORS,
    "aio": _all(
        _NOT_NEEDED,
        "`shardwise bench disk` finds block size and depth",
        block_size=1 << 20,
        queue_depth=8,
        intra_op_parallelism=1,
        thread_count=1,
        single_submit=False,
        overlap_events=True,
        use_gds=False,
    ),
    "checkpoint": _all(
        _NOT_NEEDED,
        "checkpoints of shardwise are atomic, and move between world sizes as they are",
        tag_validation="Warn",
        load_universal=False,
        use_node_local_storage=False,
        checkpoint_serialization=True,
        writer=None,
        **_PARALLEL_WRITE,
    ),
    "pipeline": _all(
        _NOT_NEEDED,
        "said where the PipelineModule is made",
        stages="auto",
        partition="best",
        seed_layers=False,
        activation_checkpoint_interval=0,
        pipe_partitioned=True,
        grad_partitioned=True,
        use_reentrant=True,
    ),
}

ELSEWHERE_SECTIONS = {
    "comms_logger": "`shardwise explain` prints what is sent, and engine.timeline(path) when",
    "flops_profiler": "run torch.profiler beside it; actions are named there",
    "timers": "the progress line has the throughput",
    "autotuning": "`budget` and `shardwise explain` choose before a step is run",
    "nebula": "engine.save(folder, wait=False) writes in the background",
    "datastates_ckpt": "engine.save(folder, wait=False) writes in the background",
}
"""Sections about watching and tuning, which change nothing that is computed."""

REFUSED_SECTIONS = {
    "amp": "NVIDIA's Apex is not used; say bf16 or fp16",
    "torch_autocast": "open torch.autocast in the script, around the forward",
    "expert_parallel": "name an axis `ep` in a mesh of shardwise (docs/experts.md)",
    "compile": "say compile: inductor in a plan of shardwise",
    "hybrid_engine": "engine.inference() generates with the weights that are trained",
    "data_efficiency": "mixtures and packing are in shardwise.data",
    "curriculum_learning": "mixtures and packing are in shardwise.data",
    "progressive_layer_drop": "the model itself may drop layers",
    "compression_training": "quantize after the training",
    "quantize_training": "quantize after the training",
    "weight_quantization": "quantize after the training",
    "sparse_attention": "the model itself says how it attends",
    "eigenvalue": "it belongs to quantize_training",
    "activation_checkpointing": "say activations: recompute, or offload, in a plan of shardwise (docs/activations.md)",
}
"""Sections that change what is computed or held, refused unless they say `enabled: false` or nothing at all."""

FREE_SECTIONS = ("optimizer.params", "scheduler.params", "zero_optimization.leaf_module", "checkpoint.writer")
"""Mappings whose keys are not DeepSpeed's own."""

RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
}
"""Older or other names of the same."""

FIELDS: dict[str, Field] = dict(_TOP)
for _name, _fields in _SECTIONS.items():
    FIELDS.update(_within(_name, _fields))
SECTION_NAMES = frozenset(name for name in (*_SECTIONS, "tensor_parallel.tp", "checkpoint.parallel_write"))


def not_understood(path: str) -> str:
    """Why the field at `path` says nothing to us, with the name that may have been meant."""
    close = difflib.get_close_matches(path, [*FIELDS, *ELSEWHERE_SECTIONS, *REFUSED_SECTIONS], n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else "DeepSpeed 0.19 has no such field either"
