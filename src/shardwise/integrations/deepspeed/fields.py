"""All fields of a `ds_config.json`, with the names and defaults of DeepSpeed 0.19, and how each is handled.

A field is honoured, not needed, available elsewhere, or refused if it is not set to its default. If DeepSpeed is
installed, tests/extras/test_deepspeed_facts.py compares names and defaults with DeepSpeed's own classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class FieldStatus(Enum):
    """How a field is handled. The values are printed in reports."""

    HONOURED = "honoured"
    NOT_NEEDED = "not needed"
    ELSEWHERE = "available elsewhere"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    AUTO = "auto"


@dataclass(frozen=True)
class Field:
    """One field: its default, how it is handled, and why."""

    default: object
    status: FieldStatus
    why: str = ""


def _all(status: FieldStatus, why: str, **defaults: object) -> dict[str, Field]:
    return {name: Field(default, status, why) for name, default in defaults.items()}


_BUCKETS = "there are no buckets: all tensors that are ready at the same time are sent together"
_PREFETCH = "prefetch_bytes limits how far gathers run ahead; parameters are freed after their last use"
_HONOURED = FieldStatus.HONOURED
_NOT_NEEDED = FieldStatus.NOT_NEEDED
_ELSEWHERE = FieldStatus.ELSEWHERE
_REFUSED = FieldStatus.REFUSED

_TOP = {
    **_all(_HONOURED, "", train_batch_size=None, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None),
    **_all(_HONOURED, "", gradient_clipping=1.0, sequence_parallel_size=1, steps_per_print=None),
    **_all(_HONOURED, "the dtype of gradients on the wire", communication_data_type=None),
    **_all(
        _NOT_NEEDED,
        "any elementwise optimizer is supported, and others are refused by name",
        zero_allow_untested_optimizer=False,
        zero_force_ds_cpu_optimizer=True,
    ),
    **_all(
        _NOT_NEEDED,
        "gradients are summed in at least their own dtype, and divided once",
        prescale_gradients=False,
        gradient_predivide_factor=1.0,
        seq_parallel_communication_data_type="fp32",
    ),
    **_all(_NOT_NEEDED, "the plan's table determines which parameters are gathered", disable_allgather=False),
    **_all(_NOT_NEEDED, "it does not change any results", vocabulary_size=None, disable_python_gc=False),
    **_all(_NOT_NEEDED, "it follows from the number of ranks and the other sizes", data_parallel_size=None),
    **_all(
        _ELSEWHERE,
        "use engine.timeline(path) and engine.memory()",
        wall_clock_breakdown=False,
        memory_breakdown=False,
        dump_state=False,
        log_level=None,
    ),
    **_all(_ELSEWHERE, "pass drop_last to the data loader", dataloader_drop_last=False),
    **_all(
        _NOT_NEEDED, "embeddings get the same gradients, dense; build them with sparse=False", sparse_gradients=False
    ),
    **_all(_REFUSED, "CUDA graphs of whole steps are not supported", graph_harvesting=False),
    **_all(_HONOURED, "", gradient_allreduce_op="mean", managed_gradient_accumulation=True),
    **_all(_REFUSED, "experts are distributed over the mesh axis `ep`", use_data_before_expert_parallelism=False),
}

_OPTIMIZER = {
    **_all(_HONOURED, "", type=None, params=None),
    **_all(_NOT_NEEDED, "there is only one implementation", legacy_fusion=False),
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
        "hysteresis is reset only when the loss scale doubles",
        consecutive_hysteresis=False,
    ),
    **_all(_REFUSED, "master weights and their gradients are fp32", fp16_master_weights_and_grads=False),
}
_BF16 = {
    **_all(_HONOURED, "", enabled=False),
    **_all(
        _HONOURED,
        "stages 1 and 2 skip steps whose gradients are not finite; stages 0 and 3 take them, as in DeepSpeed",
        check_grad_overflow=True,
    ),
    **_all(_NOT_NEEDED, "gradients are reduced and accumulated as backward produces them", immediate_grad_update=False),
    **_all(
        _REFUSED,
        'master weights are fp32; for optimizer states in bf16 use shardwise.optim.AdamW(state_dtype="bf16")',
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
    **_all(_NOT_NEEDED, "the optimizer updates unit by unit", sub_group_size=1_000_000_000),
    **_all(_NOT_NEEDED, "a unit is always gathered whole, whichever modules a rank's data uses", leaf_module=None),
    **_all(
        _NOT_NEEDED,
        "any world size resumes from any checkpoint",
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
    **_all(
        _NOT_NEEDED,
        "ranks agree in each step on which parameters have gradients",
        ignore_unused_parameters=True,
    ),
    **_all(
        _NOT_NEEDED,
        "it has no counterpart in shardwise, and does not change any results",
        memory_efficient_linear=True,
        override_module_apply=True,
        log_trace_cache_warnings=False,
        enable_sanity_checks=False,
        save_muon_momentum_buffer_in_memory=False,
        cpu_offload_use_pin_memory=None,
        compute_grad_norm=True,
    ),
    **_all(
        _HONOURED,
        "frozen matrices rest as int8 and are sent so (storage.frozen in a plan); off the device they are sent so",
        zero_quantized_nontrainable_weights=False,
    ),
    **_all(
        _HONOURED,
        "int8 weights and int4 gradients, as wire in a plan; vectors, embeddings and routers are sent as they are",
        zero_quantized_weights=False,
        zero_quantized_gradients=False,
    ),
    **_all(
        _HONOURED,
        "as wire.feedback in a plan; reset_T counts steps, and what is lost within hosts is nothing",
        zeropp_loco_param=None,
        **{"zeropp_loco_param.err_beta": 0.8, "zeropp_loco_param.reset_T": 1024},
    ),
    **_all(_REFUSED, "ZenFlow changes the update rule", zenflow=None),
}
_BUFFERS = "number and size of buffers follow from the units"
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
    **_all(_REFUSED, "SuperOffload is not supported; its target is GH200", super_offload=False),
}

_TENSOR_PARALLEL = {
    **_all(_HONOURED, "", autotp_size=None, **{"tp.tp_size": 1}),
    **_all(_NOT_NEEDED, "the plan's precision is used", dtype="fp16"),
    **_all(_NOT_NEEDED, "groups follow from the mesh", **{"tp.tp_grain_size": 1, "tp.mpu": None, "tp.tp_group": None}),
    **_all(_NOT_NEEDED, "partial sums are sent as soon as they are ready", tp_overlap_comm=False),
    **_all(_NOT_NEEDED, "models are built on the host, or without values", keep_module_on_host=False),
    **_all(
        _REFUSED,
        "use tensor: {plan: ...} in a shardwise plan",
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
    **_all(_REFUSED, "parameters have the plan's precision", param_dtype=None),
    **_all(_REFUSED, "buffers keep their dtype", buffer_dtype=None),
    **_all(_REFUSED, "use rules: {...: {classes: [...], precision: fp32}} in a plan", keep_in_fp32_modules="auto"),
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
    **_all(_NOT_NEEDED, "with `shardwise launch --elastic`, surviving ranks continue at once", min_time=0),
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
"""Sections of monitors: see `monitor.py`."""

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
    "hybrid_engine": {
        **_all(_HONOURED, "", enabled=False, pin_parameters=True, inference_tp_size=1),
        **_all(
            _NOT_NEEDED,
            "a cache is as long as generate() needs, and is freed when it returns",
            max_out_tokens=512,
            release_inference_cache=False,
        ),
        **_all(_NOT_NEEDED, "units that are not kept whole are gathered one by one", tp_gather_partition_size=8),
        **_all(_NOT_NEEDED, "it does not change any results", enable_cuda_graph=False),
    },
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
        "shardwise checkpoints are atomic, and any world size resumes from them",
        load_universal=False,
        use_node_local_storage=False,
        checkpoint_serialization=True,
        writer=None,
        **{"parallel_write.pipeline_stage": False},
    )
    | _all(_HONOURED, "", tag_validation="Warn"),
    "pipeline": _all(_HONOURED, "", activation_checkpoint_interval=0, stages="auto", partition="best")
    | _all(
        _NOT_NEEDED,
        "the arguments of PipelineModule are used",
        seed_layers=False,
        pipe_partitioned=True,
        grad_partitioned=True,
        use_reentrant=True,
    ),
}

ELSEWHERE_SECTIONS = {
    "activation_checkpointing": (
        "deepspeed.checkpointing.checkpoint recomputes; for more, use activations: in a shardwise plan"
    ),
    "comms_logger": "`shardwise explain` prints what is sent, and engine.timeline(path) when",
    "flops_profiler": "use torch.profiler, whose traces name shardwise's actions",
    "timers": "the progress line shows the throughput",
    "autotuning": "it is read by `shardwise deepspeed --autotuning tune` and `run`",
    "nebula": "engine.save(folder, wait=False) writes in the background",
    "datastates_ckpt": "engine.save(folder, wait=False) writes in the background",
}
"""Sections about monitoring and tuning, which do not change any results."""

TUNED = ("zero_optimization.stage", "train_micro_batch_size_per_gpu")
TUNED_BY = "`shardwise deepspeed --autotuning run` finds the fastest that fits"
_NO_TRIALS = "no trial jobs are run: each plan is predicted"
AUTOTUNING: Mapping[str, tuple[Any, str]] = {
    "enabled": (False, "--autotuning on the command line decides"),
    "fast": (True, "stage and micro-batch are tuned; there are no buckets to tune"),
    "results_dir": (None, ""),
    "exps_dir": (None, ""),
    "overwrite": (True, ""),
    "start_profile_step": (3, _NO_TRIALS),
    "end_profile_step": (5, _NO_TRIALS),
    "metric": ("throughput", ""),
    "tuner_type": ("gridsearch", "all stages and sizes are predicted, in seconds"),
    "tuner_early_stopping": (5, "all stages and sizes are predicted, in seconds"),
    "tuner_num_trials": (50, ""),
    "arg_mappings": (None, ""),
    "max_train_batch_size": (None, ""),
    "min_train_batch_size": (1, ""),
    "max_train_micro_batch_size_per_gpu": (1024, ""),
    "min_train_micro_batch_size_per_gpu": (1, ""),
    "num_tuning_micro_batch_sizes": (3, "all sizes that fit are compared"),
    "mp_size": (1, "the mesh has the size of tensor_parallel"),
    "model_info": (None, "parameters and activations are counted in a rehearsal"),
    "model_info_path": (None, "parameters and activations are counted in a rehearsal"),
    "metric_path": (None, _NO_TRIALS),
}
"""The fields of `autotuning`, with their defaults; with what they come to, where they have no effect."""

REFUSED_SECTIONS = {
    "amp": "NVIDIA's Apex is not supported; use bf16 or fp16",
    "torch_autocast": "use torch.autocast in the script, around the forward",
    "expert_parallel": "use an axis `ep` in the mesh of a shardwise plan (docs/experts.md)",
    "compile": "use compile: inductor in a shardwise plan",
    "data_efficiency": "mixtures and packing are in shardwise.data",
    "curriculum_learning": "mixtures and packing are in shardwise.data",
    "progressive_layer_drop": "drop layers in the model itself",
    "compression_training": "quantize after training",
    "quantize_training": "quantize after training",
    "weight_quantization": "quantize after training",
    "sparse_attention": "implement it in the model",
    "eigenvalue": "it is part of quantize_training, which is not supported",
}
"""Sections that change results or memory: refused unless they are empty or have `enabled: false`."""

_OWN_CODE = "the model's own code computes, for every model: there are no kernels to replace it"
_GROUPS_OF_MESH = "groups follow from tp_size"
_LAYERS_KNOW = "the layers themselves know"
INFERENCE: Mapping[str, Field] = {
    **_all(_HONOURED, "int8: the weights of linear layers, computed with in 16 bits", dtype="fp16"),
    **_all(_HONOURED, "", **{"tensor_parallel.enabled": True, "tensor_parallel.tp_size": 1}),
    **_all(_NOT_NEEDED, "heads are never split in two", **{"tensor_parallel.tp_grain_size": 64}),
    **_all(_REFUSED, _GROUPS_OF_MESH, **{"tensor_parallel.mpu": None, "tensor_parallel.tp_group": None}),
    **_all(_HONOURED, "the model stays on the CPU, and computes there", keep_module_on_host=False),
    **_all(
        _HONOURED,
        "a folder of Hugging Face, a checkpoint of DeepSpeed or shardwise, or a JSON file or object with a list of "
        "files; each rank keeps its own part",
        checkpoint=None,
        base_dir="",
        **{"checkpoint_config.checkpoint_dir": None, "checkpoint_config.base_dir": None},
    ),
    **_all(
        _REFUSED,
        "nothing is written: any number of ranks read their parts of any checkpoint",
        save_mp_checkpoint_path=None,
        **{"checkpoint_config.save_mp_checkpoint_path": None},
    ),
    **_all(
        _HONOURED,
        "8 or 4 bits, for dtype int8",
        **{"quant.enabled": True, "quant.weight.enabled": True, "quant.weight.num_bits": 8},
    ),
    **_all(
        _NOT_NEEDED,
        "in 8 bits each output has a symmetric scale; in 4 bits up to 64 inputs share one, from their least value up",
        **{"quant.weight.q_type": "symmetric", "quant.weight.q_groups": 1},
    ),
    **_all(
        _NOT_NEEDED,
        "weights alone are in fewer bits, as in DeepSpeed",
        **{
            "quant.activation.enabled": True,
            "quant.activation.num_bits": 8,
            "quant.activation.q_type": "symmetric",
            "quant.activation.q_groups": 1,
            "quant.qkv.enabled": True,
        },
    ),
    **_all(
        _REFUSED,
        "set dtype to int8: all linear layers but the head are in as many bits as num_bits says",
        **{"quant.weight.quantized_initialization": {}, "quant.weight.post_init_quant": {}},
    ),
    **_all(
        _NOT_NEEDED,
        _OWN_CODE,
        replace_with_kernel_inject=False,
        replace_method="auto",
        use_triton=False,
        triton_autotune=False,
        enable_cuda_graph=False,
        triangular_masking=True,
        return_tuple=True,
        transposed_mode=False,
        config=None,
    ),
    **_all(
        _NOT_NEEDED,
        "models that have a tensor-parallel plan, their own or ours, are split by it, and others are refused",
        injection_policy=None,
    ),
    **_all(_REFUSED, "it is internal to DeepSpeed; leave it out", injection_policy_tuple=None),
    **_all(
        _NOT_NEEDED,
        "a cache is as long as generate() needs; only the model limits the number of tokens",
        max_out_tokens=1024,
        min_out_tokens=1,
    ),
    **_all(_NOT_NEEDED, "models may be built inside OnDevice or not", set_empty_params=False),
    **_all(_NOT_NEEDED, "checkpoints are whole, or of any number of ranks", training_mp_size=1),
    **_all(
        _NOT_NEEDED,
        "it is not read by DeepSpeed either; to generate with a model that does not fit, use initialize() with stage 3",
        zero={},
    ),
    **_all(_REFUSED, "every rank has all experts, or its part of each along tp", **{"moe.ep_size": 1}),
    **_all(_REFUSED, _GROUPS_OF_MESH, **{"moe.ep_mp_group": None, "moe.ep_group": None}),
    **_all(_NOT_NEEDED, _LAYERS_KNOW, **{"moe.enabled": True, "moe.moe_experts": [1], "moe.type": "standard"}),
}
"""The arguments of `init_inference`, with the defaults of DeepSpeed's `DeepSpeedInferenceConfig`."""
INFERENCE_RENAMED: Mapping[str, str] = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "ckpt_config": "checkpoint_config",
    "injection_dict": "injection_policy",
    "args": "config",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "mp_size": "tensor_parallel.tp_size",
    "mpu": "tensor_parallel.mpu",
    "ep_size": "moe.ep_size",
    "ep_group": "moe.ep_group",
    "expert_group": "moe.ep_group",
    "ep_mp_group": "moe.ep_mp_group",
    "expert_mp_group": "moe.ep_mp_group",
    "moe_experts": "moe.moe_experts",
    "moe_type": "moe.type",
    "moe.num_experts": "moe.moe_experts",
    "moe.expert_group": "moe.ep_group",
}
"""Other names of arguments, most of them older."""

FREE_SECTIONS = ("optimizer.params", "scheduler.params", "zero_optimization.leaf_module", "checkpoint.writer")
"""Mappings with arbitrary keys."""

RENAMED = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
}
"""Older or alternative names of fields."""

FIELDS: dict[str, Field] = {
    **_TOP,
    **{f"{section}.{name}": field for section, fields in _SECTIONS.items() for name, field in fields.items()},
}
SECTION_NAMES = frozenset((*_SECTIONS, "tensor_parallel.tp", "checkpoint.parallel_write"))


def why_unknown(path: str) -> str:
    """A note on an unknown field, with the name that may have been meant."""
    close = difflib.get_close_matches(path, [*FIELDS, *ELSEWHERE_SECTIONS, *REFUSED_SECTIONS], n=1, cutoff=0.75)
    return f"did you mean {close[0]}?" if close else "DeepSpeed 0.19 has no such field"
