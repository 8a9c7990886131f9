"""DeepSpeed's public names: what has no effect here, what is refused, and what to use instead, one row each.

Docs (`page()`), the errors of absent names, and tests come from this table. tests/fixtures/deepspeed/surface.txt lists
the names that DeepSpeed has, found by machine. A row of a module is also that of every name and module in it which has
none of its own; if the module exists, such a row is called `module.*`. Names without a row work.
"""

from __future__ import annotations

from importlib.abc import MetaPathFinder

from shardwise.integrations.deepspeed.fields import INFERENCE, Field
from shardwise.integrations.name_table import NameStatus, Row, listed, no_effect, printed, refusal_of, refused, row_in

_PARTS = "use {}, which all ranks call; parts of a parameter cannot be read or written"
_GROUPS = "groups follow from the mesh; see engine.shardwise.mesh and engine.shardwise.data_ranks"
_INSIDE = "it is a part of DeepSpeed's own implementation; use the engine's methods, or those of engine.shardwise"
_ESTIMATES = "use engine.shardwise.rehearse(batch), or `shardwise explain PLAN --world N --model FILE:CALLABLE`"
_COMPILE = "use compile: inductor in a shardwise plan"
_DATA = "mixtures and packing are in shardwise.data"
_PROFILE = "use torch.profiler, whose traces name shardwise's actions, or engine.shardwise.timeline(path)"
_TUNING = "use `shardwise deepspeed --autotuning tune` in a shell"
_QUANTIZE = "quantize after training"
_TENSOR = "set tensor_parallel.autotp_size in the config"
_INFERENCE = "use deepspeed.init_inference(model, config); other programs serve what engine.shardwise.publish() writes"
_ROLLOUT = "set hybrid_engine in the config, and use engine.generate()"
_SEQUENCE = "set sequence_parallel_size in the config"
_CONFIG = "give the config to initialize() as a dict or a file; shardwise.integrations.deepspeed.read_config checks it"
_REDUCED = "backward() or step() reduces gradients; collectives are in torch.distributed"
_MONITORS = "set monitors in the config, and use engine.monitor.write_events(events)"
_RECOMPUTE = "use deepspeed.checkpointing.checkpoint, or activations: in a shardwise plan"
_CHECKPOINTS = "use `shardwise convert` and `shardwise inspect`; any checkpoint resumes on any number of ranks"
_SETUP = "set a scheduler in the config"
_LAYER_DROP = "drop layers in the model itself"
_DENSE = "embedding gradients are always dense"
_SPLIT = "use a tensor-parallel plan: tensor: {plan: ...} (docs/splits.md)"
_LAUNCH = "use `shardwise deepspeed` or `shardwise launch` in a shell"
_MODULES: dict[str, Row] = {
    **refused(_TENSOR, "deepspeed", "tp_model_init set_autotp_mode module_inject record_tp_model_init_args"),
    **refused(_TENSOR, "deepspeed", "merge_tp_model_init_into_config runtime.tensor_parallel"),
    **refused(_INFERENCE, "deepspeed", "inference.* inference.engine.* DeepSpeedInferenceConfig"),
    **refused(_INFERENCE, "deepspeed", "model_implementations"),
    **refused(_ROLLOUT, "deepspeed", "runtime.hybrid_engine_graph runtime.rollout"),
    **refused(_TUNING, "deepspeed", "autotuning"),
    **refused(
        _QUANTIZE,
        "deepspeed",
        "compression.* compression.helper.* linear runtime.quantize runtime.weight_quantizer runtime.compression",
    ),
    **refused(_PROFILE, "deepspeed", "profiling utils.comms_logging utils.get_caller_func"),
    **refused("implement it in the model", "deepspeed", "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"),
    **refused("implement it in the model", "deepspeed", "replace_transformer_layer revert_transformer_layer"),
    **refused("implement it in the model", "deepspeed.ops", "transformer sparse_attention deepspeed4science"),
    **refused("nothing is compiled at first use", "deepspeed.ops", "compile"),
    **refused("set pin_memory in the config: it is always on", "deepspeed.ops", "pin_memory"),
    **refused(_QUANTIZE, "deepspeed.ops", "fp_quantizer quantizer"),
    **refused("use torch's operators", "deepspeed.ops", "triton_ops random_ltd"),
    **refused("`shardwise bench disk` measures disks, and plans use them", "deepspeed", "nvme io ops.aio ops.gds"),
    **refused("engine.shardwise.save(folder, wait=False) writes in the background", "deepspeed", "nebula datastates"),
    **refused(_SEQUENCE, "deepspeed", "sequence runtime.sequence_parallel"),
    **refused("tensor parallelism overlaps its communication by itself", "deepspeed", "domino runtime.domino"),
    **refused(_COMPILE, "deepspeed", "compile runtime.compiler is_compile_supported utils.static_cache"),
    **refused(_CHECKPOINTS, "deepspeed", "checkpoint runtime.checkpoint_engine runtime.model_checkpointing"),
    **refused(_CHECKPOINTS, "deepspeed.runtime", "state_dict_factory"),
    **refused(_CONFIG, "deepspeed.runtime", "config.* config_utils precision_config constants zero.config.*"),
    **refused(_CONFIG, "deepspeed", "load_ds_config constants utils.config set_optimizer_flags"),
    **refused("`shardwise doctor` reports on the environment", "deepspeed", "env_report compat git_hash git_branch"),
    **refused(_LAUNCH, "deepspeed.launcher", "launch launcher_helper multinode_runner constants"),
    **refused(
        _LAUNCH,
        "deepspeed.launcher.runner",
        "encode_world_info fetch_hostfile parse_args parse_inclusion_exclusion parse_node_config parse_num_nodes "
        "parse_node_config_list parse_resource_filter run_autotuning",
    ),
    **refused(_SETUP, "deepspeed", "add_tuning_arguments"),
    **refused(
        _SETUP,
        "deepspeed.runtime.lr_schedules",
        "add_tuning_arguments get_config_from_args get_lr_from_config get_torch_optimizer override_1cycle_params "
        "override_lr_range_test_params override_params override_warmupLR_params parse_arguments update_lr",
    ),
    **refused("use torch.optim.Optimizer", "deepspeed", "DeepSpeedOptimizer runtime.base_optimizer"),
    **refused("use deepspeed.DeepSpeedEngine.deepspeed_io", "deepspeed", "DeepSpeedDataLoader"),
    **refused("use deepspeed.DeepSpeedEngine.deepspeed_io", "deepspeed.runtime.dataloader", "DeepSpeedDataLoader"),
    **refused(_INSIDE, "deepspeed", "utils.bwc utils.debug utils.exceptions utils.types utils.numa"),
    **refused(_INSIDE, "deepspeed.utils", "pin_memory pin_memory_tracker mixed_precision_linkage get_numactl_cmd"),
    **refused(_INSIDE, "deepspeed.utils", "lazy_init_hp_params_optimizer_state link_hp_params tensor_fragment.*"),
    **refused(
        _PARTS.format("safe_get_full_fp32_param and its kin"),
        "deepspeed.utils",
        "fragment_address get_full_hp_grad get_full_hp_param get_hp_fragment_mapping map_to_flat_opt_states "
        "set_full_hp_grad set_full_hp_param",
    ),
    **{
        f"deepspeed.utils.{module}safe_{verb}_local_{what}": Row(
            NameStatus.REFUSED, _PARTS.format(f"safe_{verb}_full_{what}")
        )
        for verb in ("get", "set")
        for what in ("fp32_param", "grad", "optimizer_state")
        for module in ("", "tensor_fragment.")
    },
    **refused(_GROUPS, "deepspeed.utils", "groups"),
    **refused("use Python's logging", "deepspeed.utils.logging", "LoggerFactory get_current_level get_dist_msg"),
    **refused("use Python's logging", "deepspeed.utils.logging", "print_configuration should_log_le"),
    **refused(
        "set zero_optimization.leaf_module in the config",
        "deepspeed.utils",
        "z3_leaf_module.apply_zero_leaf_module_config",
    ),
    **refused(_PROFILE, "deepspeed.utils.timer", "CudaEventTimer"),
    **refused("use torch.compile", "deepspeed.utils.torch", "is_functorch_transforming jit_script_compat"),
    **refused("use param.register_post_accumulate_grad_hook", "deepspeed.utils.torch", "register_grad_hook"),
    **refused(
        _CHECKPOINTS,
        "deepspeed.utils.zero_to_fp32",
        "GatheredTensor atoi get_checkpoint_files get_model_state_file get_model_state_files get_optim_files "
        "natural_keys parse_model_states parse_optim_states to_torch_tensor zero3_partitioned_param_info "
        "zero_model_state",
    ),
    **refused(
        _PROFILE,
        "deepspeed.comm",
        "get_comm_operation_count get_logged_comm_ops has_comm_data timed_op",
    ),
    **refused(
        "use `shardwise launch`, which finds ranks and addresses",
        "deepspeed.comm",
        "in_aml in_aws_sm in_dlts mpi_discovery patch_aml_env_for_torch_nccl_backend "
        "patch_aws_sm_env_for_torch_nccl_backend",
    ),
    **refused(
        "it is torch.distributed's",
        "deepspeed.comm",
        "init_deepspeed_backend set_backend enable_symm_mem_for_group allgather_fn reduce_scatter_fn backend ccl "
        "config constants mori torch utils has_coalescing_manager",
    ),
    **no_effect(
        "`shardwise explain` prints what is sent, and engine.timeline(path) when", "deepspeed.comm", "configure"
    ),
    **no_effect("nothing is recorded here; see engine.timeline(path)", "deepspeed.comm", "log_summary reset_log"),
    **refused(
        "use `shardwise launch --elastic`", "deepspeed.elasticity", "DSElasticAgent elastic_agent constants utils"
    ),
    **refused("use `shardwise launch --elastic`", "deepspeed.elasticity", "is_torch_elastic_compatible"),
    **refused(_CONFIG, "deepspeed.elasticity.config", "ElasticityConfig"),
    **refused(_MONITORS, "deepspeed.monitor", "comet csv_monitor tensorboard utils wandb monitor.Monitor"),
    **refused(
        _MONITORS,
        "deepspeed.monitor.config",
        "CSVConfig CometConfig DeepSpeedMonitorConfig TensorBoardConfig WandbConfig",
    ),
    **refused("use deepspeed.moe.layer.MoE", "deepspeed.moe", "experts mappings sharded_moe ep_count ep_experts"),
    **refused("use deepspeed.moe.layer.MoE", "deepspeed.moe", "ep_kernels ep_repack ep_router ep_tp_dispatch"),
    **refused("use deepspeed.moe.layer.MoE", "deepspeed.moe", "fused_expert_layout"),
    **refused(
        "gradients are averaged by the engine",
        "deepspeed.moe.utils",
        "split_params_grads_into_shared_and_expert_params",
    ),
    **refused("ZenFlow changes the update rule; use FusedAdam", "deepspeed", "runtime.zenflow"),
    **refused(
        "ZenFlow changes the update rule; use FusedAdam",
        "deepspeed.ops.adam",
        "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3 zenflow_torch_adam zenflow_cpu_adam "
        "multi_tensor_apply",
    ),
    **refused("use AdamW, Lamb or Lion", "deepspeed.ops", "adagrad.cpu_adagrad lamb.fused_lamb lion.cpu_lion"),
    **refused("use AdamW, Lamb or Lion", "deepspeed.ops", "lion.fused_lion lion.multi_tensor_apply"),
    **refused(_INSIDE, "deepspeed.runtime.fp16", "fused_optimizer loss_scaler unfused_optimizer"),
    **refused("set bf16 in the config", "deepspeed.runtime", "bf16_optimizer"),
    **refused("use torch.autocast in the script", "deepspeed.runtime", "torch_autocast"),
    **refused("it is part of quantize_training", "deepspeed.runtime", "eigenvalue"),
    **refused(_LAYER_DROP, "deepspeed.runtime", "progressive_layer_drop"),
    **refused(_DENSE, "deepspeed.runtime", "sparse_tensor"),
    **refused(_DATA, "deepspeed.runtime", "data_pipeline"),
    **refused(_REDUCED, "deepspeed.runtime", "comm"),
    **refused("offload to disk is done by the plan", "deepspeed.runtime", "swap_tensor superoffload"),
    **refused(_INSIDE, "deepspeed.runtime", "utils.* pipe.p2p pipe.schedule"),
    **refused("stages raise shardwise's errors", "deepspeed.runtime.pipe.module", "PipelineError"),
    **refused(
        "use engine.shardwise.mesh, or model.topology()", "deepspeed.runtime.pipe.topology", "PipelineParallelGrid"
    ),
    **refused(_RECOMPUTE, "deepspeed.runtime.activation_checkpointing", "checkpointing.* config offload_activations"),
    **refused(_RECOMPUTE, "deepspeed", "checkpointing.*"),
    **refused(_ESTIMATES, "deepspeed.runtime.zero", "stage3 stage_1_and_2"),
    **refused(
        _INSIDE,
        "deepspeed.runtime.zero",
        "contiguous_memory_allocator leaf_module_config linear mics mics_utils muon offload_states parameter_offload "
        "partitioned_param_coordinator partitioned_param_profiler utils DeepSpeedTensorOverride DeepSpeedZeRoOffload "
        "ZeroParamType partition_parameters.*",
    ),
    **refused(_INSIDE, "deepspeed.zero", "DeepSpeedTensorOverride DeepSpeedZeRoOffload ZeroParamType"),
    **refused(_CONFIG, "deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadOptimizerConfig"),
    **refused(_CONFIG, "deepspeed.runtime.zero.offload_config", "DeepSpeedZeroOffloadParamConfig"),
    **refused("use torch.split", "deepspeed.runtime.zero.tiling", "split_tensor_along_last_dim"),
    **refused("use the names in deepspeed.accelerator", "deepspeed.accelerator", "DeepSpeedAccelerator"),
    **refused("torch.accelerator chooses the device", "deepspeed.accelerator", "set_accelerator"),
}
"""Modules, and names in them."""

_ENGINE: dict[str, Row] = {
    **no_effect("parameters are freed after their last use", "engine", "empty_partition_cache"),
    **no_effect("`backward` or `step` reduces the gradients", "engine", "allreduce_gradients"),
    **no_effect(
        "it prints nothing; engine.shardwise.timeline(path) shows forwards", "engine", "print_forward_breakdown"
    ),
    **refused(_REDUCED, "engine", "all_gather_scalar allreduce_and_copy allreduce_bucket allreduce_no_retain"),
    **refused(
        _REDUCED, "engine", "buffered_allreduce_fallback enable_backward_allreduce gradient_average flatten unflatten"
    ),
    **refused(
        _DENSE, "engine", "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain"
    ),
    **no_effect(_DENSE, "engine", "sparse_tensor_module_names"),
    **refused(
        _GROUPS, "engine", "all_to_all_group data_parallel_group expert_data_parallel_group expert_parallel_group"
    ),
    **refused(_GROUPS, "engine", "local_all_to_all_group seq_data_parallel_group seq_parallel_group mpu mesh_device"),
    **refused(_GROUPS, "engine", "get_sequence_parallel_group is_first_weights_partition_group"),
    **refused("NVIDIA's Apex is not supported; use bf16 or fp16", "engine", "amp_params"),
    **refused(_TUNING, "engine", "autotuning_end_profile_step autotuning_metric autotuning_metric_path"),
    **refused(_TUNING, "engine", "autotuning_model_info autotuning_model_info_path autotuning_profile_model_info"),
    **refused(_TUNING, "engine", "autotuning_start_profile_step"),
    **refused(
        "use engine.optimizer and engine.lr_scheduler", "engine", "basic_optimizer client_lr_scheduler client_optimizer"
    ),
    **refused("it is part of quantize_training", "engine", "block_eigenvalue eigenvalue quantizer quantize_training"),
    **refused("it is part of quantize_training", "engine", "eigenvalue_gas_boundary_resolution eigenvalue_layer_name"),
    **refused(
        "it is part of quantize_training", "engine", "eigenvalue_layer_num eigenvalue_max_iter eigenvalue_stability"
    ),
    **refused("it is part of quantize_training", "engine", "eigenvalue_tol eigenvalue_verbose"),
    **refused(
        _CHECKPOINTS, "engine", "checkpoint_engine load_moe_state_dict load_universal_checkpoint checkpoint_mp_rank"
    ),
    **refused(_CHECKPOINTS, "engine", "save_non_zero_checkpoint save_zero_checkpoint loaded_checkpoint_dp_world_size"),
    **refused(_CHECKPOINTS, "engine", "loaded_checkpoint_mp_world_size"),
    **refused(
        "use load_checkpoint(folder, load_module_only=True), or engine.shardwise.load_state_dict(state)",
        "engine",
        "load_module_state_dict",
    ),
    **refused("set gradient_clipping in the config", "engine", "clip_fp32_gradients"),
    **refused("see wire.grad of engine.shardwise.plan", "engine", "communication_data_type"),
    **refused(_COMPILE, "engine", "compile compile_autosp compile_autotp compile_zero_optimization_stage"),
    **refused(_COMPILE, "engine", "get_autosp_backend get_autotp_backend get_compile_time get_deepcompile_backend"),
    **refused(_COMPILE, "engine", "get_deepspeed_compile_backend register_compile_pass uses_parallelization_pass_only"),
    **refused(_QUANTIZE, "engine", "compression_scheduler"),
    **refused(_DATA, "engine", "curriculum_learning_config curriculum_params_legacy curriculum_scheduler_legacy"),
    **refused(_DATA, "engine", "data_efficiency_config data_sampling_config random_ltd_config random_ltd_initialize"),
    **refused(
        _DATA, "engine", "random_ltd_scheduler set_custom_curriculum_learning_schedule set_data_post_process_func"
    ),
    **refused(
        "the engine does not keep it", "engine", "training_data dont_change_device first_dataloader_check losses"
    ),
    **refused(
        "the engine does not keep it", "engine", "gas_boundary_ctr inside_no_sync_ctxt is_iterable_style_dataset"
    ),
    **refused("the engine does not keep it", "engine", "is_map_style_dataset summary_events warn_unscaled_loss"),
    **refused("the engine does not keep it", "engine", "use_ds_comm dist_backend scale_wrt_gas pipeline_parallelism"),
    **refused("see engine.shardwise.plan.loss_scale", "engine", "dynamic_loss_scale_args initial_dynamic_scale"),
    **refused("use torch.autocast in the script", "engine", "torch_autocast_dtype torch_autocast_z0_gradscaler"),
    **refused("use torch.autocast in the script", "engine", "torch_autocast_lower_precision_safe_modules"),
    **refused(_PROFILE, "engine", "engine_timers engine_timers_cache flops flops_profiler flops_profiler_detailed"),
    **refused(_PROFILE, "engine", "flops_profiler_module_depth flops_profiler_output_file flops_profiler_profile_step"),
    **refused(_PROFILE, "engine", "flops_profiler_recompute_fwd_factor flops_profiler_top_modules fwd_duration"),
    **refused(_PROFILE, "engine", "get_wall_clock_timers"),
    **refused(
        "use deepspeed.moe.utils.has_moe_layers(model)", "engine", "gate_modules has_moe_layers moe_layers num_experts"
    ),
    **refused(_LAYER_DROP, "engine", "get_pld_theta pld_gamma pld_params pld_theta progressive_layer_drop"),
    **refused("use torch's module hooks", "engine", "module_forward_post_hook module_forward_pre_hook zero_grad_hooks"),
    **refused("use engine.module.named_parameters()", "engine", "param_names"),
    **refused("LoRA layers of the model are trained as they are", "engine", "optimized_linear_base_weight_sharding"),
    **refused("LoRA layers of the model are trained as they are", "engine", "optimized_linear_lora_enabled"),
    **refused("offload to disk is done by the plan", "engine", "swap_tensor_config"),
    **refused(_SPLIT, "engine", "tensor_parallel_config"),
    **refused("ZenFlow changes the update rule", "engine", "zenflow_config update_interval"),
}
"""Names of the engine that `deepspeed.initialize` returns."""
_PIPELINE: dict[str, Row] = {
    **no_effect("shapes may change from step to step", "pipeline engine", "reset_activation_shape"),
    **no_effect("a stage sends tensors of any dtype", "pipeline engine", "set_has_attention_mask"),
    **refused("loss_fn may keep its parts", "pipeline engine", "get_additional_losses agg_additional_losses"),
    **refused("loss_fn may keep its parts", "pipeline engine", "total_additional_losses"),
    **refused("train_batch() returns the mean loss", "pipeline engine", "agg_loss agg_train_loss dp_group_loss loss"),
    **refused("train_batch() returns the mean loss", "pipeline engine", "total_loss loss_model"),
    **refused(
        "use engine.shardwise.mesh", "pipeline engine", "grid is_data_parallel is_model_parallel is_pipe_parallel"
    ),
    **refused("use engine.shardwise.mesh", "pipeline engine", "next_stage prev_stage stage_id"),
    **refused("use engine.shardwise.log", "pipeline engine", "log_for_device log_batch_step_id tput_log batch_timer"),
    **refused(_CHECKPOINTS, "pipeline engine", "load_module_state_dict"),
    **refused(
        _INSIDE,
        "pipeline engine",
        "batch_fn data_iterator dynamic_shape enable_backward_allreduce eval_return_logits first_gradient_send "
        "first_output_send fwd_outputs grad_layer grad_partition_grad_layer_meta_cache has_attention_mask "
        "has_bool_tensors is_grad_partitioned is_pipe_partitioned meta_buffer num_pipe_buffers outputs pipe_buffers "
        "pipe_partition_grad_meta_cache pipe_partition_input_meta_cache pipe_partition_output_meta_cache "
        "pipe_recv_buf pipeline_enable_backward_allreduce summary_events using_bf16_optimizer",
    ),
    **refused("shardwise reduces gradients of tied weights", "PipelineModule", "allreduce_tied_weight_gradients"),
    **refused(
        "shardwise reduces gradients of tied weights", "PipelineModule", "get_tied_weights_and_groups tied_comms"
    ),
    **refused(_CHECKPOINTS, "PipelineModule", "ckpt_layer_path ckpt_layer_path_list ckpt_prefix load_state_dir"),
    **refused(_CHECKPOINTS, "PipelineModule", "save_state_dict"),
    **refused("loss_fn may keep its parts", "PipelineModule", "get_additional_losses"),
    **refused(
        "use engine.shardwise.mesh", "PipelineModule", "global_rank local_rank world_group world_size mpu stage_id"
    ),
    **refused(
        _INSIDE,
        "PipelineModule",
        "base_seed curr_layer dynamic_shape forward_funcs fwd_map interval_was_zero is_checkpointable_results "
        "is_checkpointable_results_interval micro_offset parts partitions seed_fn seed_layers stage_owner tied_modules "
        "tied_weight_attrs",
    ),
}
"""Names of a `PipelineEngine` that other engines do not have, and of a `PipelineModule`."""
_BUILDERS = "nothing is compiled at first use"
_ACCELERATOR: dict[str, Row] = {
    **no_effect("profilers of the device mark ranges, where it has them", "get_accelerator()", "range_push range_pop"),
    **refused(_BUILDERS, "get_accelerator()", "build_extension create_op_builder get_op_builder op_builder_dir"),
    **refused("CUDA graphs of whole steps are not supported", "get_accelerator()", "capture_to_graph create_graph"),
    **refused("CUDA graphs of whole steps are not supported", "get_accelerator()", "replay_graph"),
    **refused("use torch's operators", "get_accelerator()", "prefer_triton_grouped_mm"),
    **refused("memory is unpinned when it is freed", "get_accelerator()", "unpin_memory"),
}
"""Names of `deepspeed.accelerator.get_accelerator()`."""

_SCHEDULE_PARTS = "use get_lr(), get_last_lr(), get_mom() and step()"
_SCHEDULES: dict[str, Row] = {
    **refused(
        _SCHEDULE_PARTS,
        "OneCycle",
        "cycle_momentum decay_lr_rate decay_mom_rate decay_step_size first_stair_count first_step_size max_moms "
        "min_moms second_stair_count second_step_size skip_lr_decay skip_mom_decay step_ratio total_size",
    ),
    **refused(_SCHEDULE_PARTS, "WarmupLR", "inverse_log_warm_up"),
}
"""Names of learning rate schedules."""

NAMES: dict[str, Row] = {**_MODULES, **_ENGINE, **_PIPELINE, **_ACCELERATOR, **_SCHEDULES}
"""All rows, by the name of a module or of something in one, or of an object and its member."""

_OBJECTS = ("engine", "pipeline engine", "PipelineModule", "get_accelerator()")

SETTINGS = {
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "cpuadam_cores_perc": "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    "dataloader_drop_last": "dataloader_drop_last",
    "dump_state": "dump_state",
    "elasticity_enabled": "elasticity.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "get_data_types": "data_types",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "graph_harvesting": "graph_harvesting",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "aio_config": "aio",
    "log_level": "log_level",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "memory_breakdown": "memory_breakdown",
    "mics_shard_size": "zero_optimization.mics_shard_size",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "sparse_gradients_enabled": "sparse_gradients",
    "steps_per_print": "steps_per_print",
    "super_offload": "zero_optimization.offload_optimizer.super_offload",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_allgather_sequential": "zero_optimization.stage3_allgather_sequential",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_elastic_checkpoint": "zero_optimization.elastic_checkpoint",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_legacy_stage1": "zero_optimization.legacy_stage1",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_log_trace_cache_warnings": "zero_optimization.log_trace_cache_warnings",
    "zero_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
    "zero_model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
    "zero_module_granularity_threshold": "zero_optimization.stage3_module_granularity_threshold",
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_overlap_comm": "zero_optimization.overlap_comm",
    "zero_param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
    "zero_partial_offload": "zero_optimization.offload_optimizer.ratio",
    "zero_prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_save_muon_momentum_buffer_in_memory": "zero_optimization.save_muon_momentum_buffer_in_memory",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zeropp_loco_param": "zero_optimization.zeropp_loco_param",
}
"""Methods of the engine that return the value of a config field, by its path; of a section, a dict of its values."""
OFF = frozenset(
    (
        "amp_enabled",
        "autotuning_enabled",
        "checkpoint_writer_enabled",
        "curriculum_enabled_legacy",
        "curriculum_learning_enabled",
        "data_efficiency_enabled",
        "data_sampling_enabled",
        "eigenvalue_enabled",
        "flops_profiler_enabled",
        "is_deepcompile_active",
        "is_deepcompile_enabled",
        "is_elastic_model_parallel_supported",
        "pld_enabled",
        "random_ltd_enabled",
        "torch_autocast_enabled",
    )
)
"""Methods of the engine that return false: a config that enables these is refused, or gets a note."""


_PRIVATE = Row(NameStatus.REFUSED, _INSIDE)


def row_of(name: str) -> Row | None:
    """The row of `name`, or else of the innermost module that contains it and has one; `None` if there is none.

    The row `module.*` is that of what is in a module which exists.
    """
    name = name.replace("deepspeed.comm.comm.", "deepspeed.comm.", 1)
    if name in NAMES:
        return NAMES[name]
    owner, _, last = name.rpartition(".")
    if owner in _OBJECTS and last.startswith("_") and not last.startswith("__"):
        return _PRIVATE
    return row_in(NAMES, name)


def refusal(name: str) -> str | None:
    """The message of the error for `name`, if its row refuses it or if a module that is here lacks it: constants of
    DeepSpeed's modules, and what these import for themselves, have no rows."""
    row, (_, *inner, last) = row_of(name), name.split(".")
    is_lacking = row is None and name.startswith("deepspeed.") and inner and not last.startswith("__")
    return refusal_of(name, _PRIVATE if is_lacking else row)


class RefusedImports(MetaPathFinder):
    """Refuses imports of absent modules. `from deepspeed import name` asks for a submodule `deepspeed.name`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith("deepspeed.") and (message := refusal(fullname)):
            raise ImportError(message, name=fullname)


def page() -> str:
    """The page docs/deepspeed-names.md."""
    lines = [_INTRODUCTION]
    for title, rows in _SECTIONS:
        lines += printed(title, rows)
    lines += ["\n## Arguments of `init_inference`\n", "| arguments | here |", "|---|---|"]
    by_field: dict[str, list[str]] = {}
    for path, field in INFERENCE.items():
        by_field.setdefault(_became(field), []).append(path)
    lines += [f"| {listed(paths)} | {said} |" for said, paths in by_field.items()]
    lines.append("\nOlder and shorter names, such as `mp_size`, `tp`, `max_tokens`, `kernel_inject`, are known too.")
    lines.append("\n## Values of the config\n")
    lines.append(
        f"These methods of the engine return the config's value, or DeepSpeed's default: {listed(SETTINGS)}.\n"
    )
    lines.append(f"These return false, because configs that enable them are refused or noted: {listed(sorted(OFF))}.")
    return "\n".join(lines) + "\n"


def _became(field: Field) -> str:
    return field.status.value + (f": {field.why}" if field.why else "")


_INTRODUCTION = """# DeepSpeed's names

What of DeepSpeed's public interface has no effect under [shardwise's `deepspeed`](deepspeed.md), and what is refused,
with what to use instead; so says the `ImportError` or `AttributeError`, too. Everything else that DeepSpeed's modules
and engines define works. A row for a module, or for `module.*`, holds for what is in it, does not work and has no row
of its own. This page is made by `shardwise.integrations.deepspeed.names.page()`."""
_SECTIONS = (
    ("Modules", _MODULES),
    ("The engine", _ENGINE),
    ("Pipelines", _PIPELINE),
    ("The accelerator", _ACCELERATOR),
    ("Learning rate schedules", _SCHEDULES),
)
