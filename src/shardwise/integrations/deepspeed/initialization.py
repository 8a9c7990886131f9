"""`initialize`: reads the config, joins the world, and builds optimizer, LR scheduler and engine."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shardwise as sw
from shardwise.errors import ConfigError, StateError, nearest
from shardwise.init import end_recording
from shardwise.integrations.deepspeed.autotuning import VARIABLE, Tuner, first_config
from shardwise.integrations.deepspeed.config import ComponentConfig, TranslatedConfig, load_config, read_config
from shardwise.integrations.deepspeed.elasticity import elasticity_enabled, ensure_immutable_elastic_config
from shardwise.integrations.deepspeed.engine import DeepSpeedEngine, Scheduler, release
from shardwise.integrations.deepspeed.generation import Generation
from shardwise.integrations.deepspeed.hybrid_engine import DeepSpeedHybridEngine
from shardwise.integrations.deepspeed.leaf_modules import mark_by_config
from shardwise.integrations.deepspeed.logging import set_log_level_from_string
from shardwise.integrations.deepspeed.moe import expert_ranks_of
from shardwise.integrations.deepspeed.monitor import require_monitors
from shardwise.integrations.deepspeed.muon import make_muon
from shardwise.integrations.deepspeed.onebit import is_onebit, make_onebit, require_stage_0
from shardwise.integrations.deepspeed.pipe import PipelineEngine, PipelineModule
from shardwise.integrations.deepspeed.schedules import make_schedule
from shardwise.integrations.deepspeed.topology import require_topology
from shardwise.system.printable import printable
from shardwise.system.process_rank import process_rank_of

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
OptimizerOrFactory = torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer]
SchedulerOrFactory = Scheduler | Callable[[torch.optim.Optimizer], Scheduler]
Config = Mapping[str, Any] | str | Path

_KNOWN = ("Adam", "AdamW", "Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "SGD", "ZeroOneAdam")
_ADAMS = ("adam", "adamw")
_OF_MUP = {"muadam": "MuAdam", "muadamw": "MuAdamW", "musgd": "MuSGD"}
_IGNORED_PARAMS = {
    "min_coeff",
    "max_coeff",
    "torch_adam",
    "adam_w_mode",
    "fp32_optimizer_states",
    "set_grad_none",
    "bias_correction",
}


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: OptimizerOrFactory | None = None,
    model_parameters: Params | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: SchedulerOrFactory | None = None,
    distributed_port: int = 29500,
    mpu: object | None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Config | None = None,
    mesh_param: object | None = None,
    config_params: Config | None = None,
    *,
    world: sw.World | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Scheduler | None]:
    """Shard `model`; returns engine, optimizer, data loader and LR scheduler, like `deepspeed.initialize`.

    All ranks call. The config is `config`, `config_params` or `args.deepspeed_config`: a mapping or a JSON file.
    A model that has an engine already gets a new one, with its present weights: the earlier engine ends, and its
    optimizer states are dropped. Inside `zero.Init` this ends that context.
    `optimizer` and `lr_scheduler` may be objects or functions that create them; they override those of the config.
    `world` is for ranks that have already joined one.

    Raises `StateError` if `dist_init_required` is false and torch has no process group, `ConfigError` for a config
    that is contradictory or not supported (`config.read_config`), and the errors of `shardwise.shard`.
    """
    if model is None:
        raise ConfigError("initialize() needs a model.")
    if mpu is not None or mesh_param is not None:
        raise ConfigError(
            "mpu and mesh_param, which describe another library's model parallelism, are not supported. Leave them "
            "out, and set tensor_parallel or sequence_parallel_size in the config: neighbouring ranks share a batch "
            "then, and engine.shardwise.data_ranks says which one."
        )
    source = asked = _config_of(args, config, config_params)
    if VARIABLE in os.environ:
        asked = load_config(source)
        source = first_config(asked)
    end_recording()
    joined = _joined(dist_init_required) if world is None else world
    try:
        stages = model.num_stages if isinstance(model, PipelineModule) else None
        translated = read_config(source, world_size=joined.size, num_stages=stages, may_sum=True)
        _require_possible(translated, model)
        if translated.optimizer is not None and optimizer is None:
            require_stage_0(translated.optimizer.name, translated.stage)
        plan = _with_stages(_with_experts(translated, expert_ranks_of(model)), model)
        if joined.membership is not None:  # batches and loops of these scripts are those of one world size
            plan["survive"] = "checkpoint"
        release(model)
        Generation.remove(model)
        made = _optimizer(optimizer, translated.optimizer, model, model_parameters)
        schedule = _schedule(lr_scheduler, translated.scheduler, made)
        tuner = _tuner(asked, model, made)
        inner = sw.shard(model, plan, optimizer=made, world=joined)
        if tuner is not None:
            tuner.watch(model, joined)
        if translated.sums_gradients:
            inner.weigh(1, of=1)  # a mean in which every rank has all there is counts each in full: a sum
        if level := translated.value("log_level"):
            set_log_level_from_string(level)
        mark_by_config(model, translated.value("zero_optimization.leaf_module") or {})
        if isinstance(model, PipelineModule) and translated.recomputed_run:
            model.activation_checkpoint_interval = translated.recomputed_run
        engine = _kind_of_engine(translated, model)(inner, translated, made, schedule, collate_fn)
    except BaseException as error:
        if world is None:
            joined.close(error)
        raise
    if joined.rank == 0 and (report := translated.report()):
        print(f"shardwise: notes on the DeepSpeed config\n{printable(report)}")
    loader = None if training_data is None else engine.training_loader(training_data)
    return engine, made, loader, schedule


def _kind_of_engine(translated: TranslatedConfig, model: nn.Module) -> type[DeepSpeedEngine]:
    if isinstance(model, PipelineModule):
        return PipelineEngine
    return DeepSpeedHybridEngine if translated.value("hybrid_engine.enabled") else DeepSpeedEngine


def _tuner(config: Config, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Tuner | None:
    """What ends this job, if it is only started to be tuned."""
    if VARIABLE not in os.environ:
        return None
    if isinstance(model, PipelineModule):
        raise ConfigError("--autotuning is not for a PipelineModule. Use shardwise plan --axes pp, with its model.")
    return Tuner(load_config(config), model, optimizer)


def _joined(dist_init_required: bool | None) -> sw.World:
    if dist_init_required is False:
        init_distributed(dist_init_required=False)
    return sw.World.join()


def _require_possible(translated: TranslatedConfig, model: nn.Module) -> None:
    """Raise `ConfigError` for what the config alone does not show: another topology, elastic batches of another job,
    monitors without their packages."""
    if isinstance(model, PipelineModule) and model.given_topology is not None:
        tensor = translated.plan.get("mesh", {}).get("tp", 1)
        require_topology(model.given_topology, translated.num_replicas, tensor)
    if elasticity_enabled(translated.source):
        ensure_immutable_elastic_config(translated.source["elasticity"])
    require_monitors(translated.monitors)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--deepspeed` and `--deepspeed_config` to `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="train with DeepSpeed's calls")
    group.add_argument("--deepspeed_config", default=None, type=str, help="a DeepSpeed config, a JSON file")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object | None = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize torch's default process group, unless the script has done so. All ranks call.

    `timeout`, `init_method`, `rank` and `world_size` are those of `torch.distributed.init_process_group`. The launcher
    has set rank and port, so `auto_mpi_discovery` and `distributed_port` are not needed; nothing is printed or logged,
    so `verbose` and `config` are not either. With `dist_init_required=False` it must have been initialized.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise StateError(
            "init_distributed(dist_init_required=False) needs a process group, and there is none. Call "
            "torch.distributed.init_process_group first, or leave out dist_init_required."
        )
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)


def init_distributed_if_launched() -> None:
    """`init_distributed()`, if a launcher has said as `torchrun` does where ranks meet. Under an MPI launcher they meet
    by MPI, and in an elastic job each world opens a process group of its own: there it does nothing."""
    is_told = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
    if is_told and "SHARDWISE_MEMBER" not in os.environ and not process_rank_of(os.environ).is_mpi:
        init_distributed()


def _with_stages(plan: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The plan with the stages that a `PipelineModule` asks for, if there are several."""
    stages = model.stages if isinstance(model, PipelineModule) and model.num_stages > 1 else None
    return {**plan} if stages is None else {**plan, "pipeline": {"stages": stages}}


def _with_experts(translated: TranslatedConfig, ep_size: int) -> dict[str, Any]:
    """The plan with an axis `ep` of this size, taken from the data-parallel ranks."""
    if ep_size == 1:
        return translated.plan
    mesh: dict[str, int] = translated.plan.get("mesh", {"dp": -1})
    if translated.sums_gradients:
        raise ConfigError(
            f"ep_size {ep_size} cannot be combined with gradient_allreduce_op: sum. Leave it out, and multiply the "
            f"loss by the number of data-parallel ranks."
        )
    if "local" in mesh:
        raise ConfigError(
            f"ep_size {ep_size} cannot be combined with mics_shard_size or zero_hpz_partition_size. Remove one of them."
        )
    if translated.num_replicas % ep_size:
        raise ConfigError(
            f"The number of data-parallel ranks, {translated.num_replicas}, is not a multiple of ep_size {ep_size}."
        )
    return {**translated.plan, "mesh": {**mesh, "ep": ep_size}}


def _config_of(args: argparse.Namespace | None, config: Config | None, config_params: Config | None) -> Config:
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)  # its former name
    given = [one for one in (config, config_params, from_args) if one is not None]
    if not given:
        raise ConfigError("There is no DeepSpeed config. Pass config=, or --deepspeed_config.")
    if config is not None and from_args is not None:
        raise ConfigError("There are two DeepSpeed configs, config= and --deepspeed_config. Pass only one.")
    return given[0]


def _optimizer(
    given: OptimizerOrFactory | None, named: ComponentConfig | None, model: nn.Module, params: Params | None
) -> torch.optim.Optimizer | None:
    if isinstance(given, torch.optim.Optimizer):
        return given
    trained: list[Any] = [one for one in model.parameters() if one.requires_grad] if params is None else list(params)
    if given is not None:
        made = given(trained)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"optimizer returned a {type(made).__name__}, which is not a torch.optim.Optimizer.")
        return made
    return None if named is None else make_optimizer(named, trained, model)


def make_optimizer(named: ComponentConfig, params: list[Any], model: nn.Module | None = None) -> torch.optim.Optimizer:
    """The optimizer that a config names, with DeepSpeed's defaults.

    Muon chooses its matrices by their names in `model`. As in DeepSpeed, "Adam" is AdamW unless `adam_w_mode` is false.
    Raises `ConfigError` for an unknown name, and for parameters that the optimizer does not have.
    """
    options = dict(named.params)
    if is_onebit(named.name):
        return make_onebit(named.name, params, options)
    for key in ("max_grad_norm", "cuda_aware", "comm_backend_name", "freeze_step"):
        if options.pop(key, None):
            raise ConfigError(
                f"optimizer.params.{key} is not supported for {named.name}. To clip gradients, set gradient_clipping."
            )
    if options.get("bias_correction") is False:
        raise ConfigError("optimizer.params.bias_correction: false is not supported. Adam always corrects its moments.")
    if named.name.lower() == "muon":
        return make_muon(params, options, model)
    kind, defaults = _kind_of(named.name, options)
    options = {key: value for key, value in options.items() if key not in _IGNORED_PARAMS}
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    try:
        return kind(params, **{**defaults, **options})
    except TypeError as error:
        raise ConfigError(f"optimizer.params are not valid for {named.name}: {error}.") from error


def _kind_of(name: str, options: Mapping[str, Any]) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    lower = name.lower()
    if lower in _ADAMS:
        is_decoupled = lower == "adamw" or options.get("adam_w_mode", True)
        kind: Any = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        return kind, {} if options.get("torch_adam") else {"weight_decay": 0.0}
    if lower == "lamb":
        bounds = float(options.get("min_coeff", 0.01)), float(options.get("max_coeff", 10.0))
        return sw.optim.Lamb, {"weight_decay": 0.0, "eps": 1e-8, "ratio_bounds": bounds}
    if lower == "lion":
        return sw.optim.Lion, {"weight_decay": 0.0, "betas": (0.9, 0.999)}
    if lower in _OF_MUP:
        return _of_mup(_OF_MUP[lower]), {}
    found = getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.type is {name!r}. {nearest(name, _KNOWN)}")
    return found, {}


def _of_mup(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer with rates by width (arXiv:2203.03466) that has this name in the package mup."""
    try:
        found: Callable[..., torch.optim.Optimizer] = getattr(importlib.import_module("mup"), name)
    except ImportError as error:
        raise ConfigError(f"optimizer.type {name} needs the package mup, which is not installed.") from error
    return found


def _schedule(
    given: SchedulerOrFactory | None, named: ComponentConfig | None, optimizer: torch.optim.Optimizer | None
) -> Scheduler | None:
    if given is None and named is None:
        return None
    if given is not None and hasattr(given, "step"):
        return given  # type: ignore[return-value]
    if optimizer is None:
        raise ConfigError("There is an LR scheduler, but no optimizer for it.")
    if callable(given):
        return given(optimizer)
    assert named is not None
    made: Scheduler = make_schedule(named.name, optimizer, named.params)
    return made
