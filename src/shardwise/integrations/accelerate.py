"""Hugging Face Accelerate on our engine: `Accelerator(plan="zero3")` instead of accelerate's own class.

`prepare` shards a model in place instead of wrapping it, and the optimizer updates this rank's pieces. Batches and
metrics are handled by accelerate as usual; what is logged also goes to the engine's run record. Saving and loading are
collective, and ranks that do not save meet the others as `accelerate_coordination.py` says.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from accelerate.utils.dataclasses import FP8BackendType
from torch import nn
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import ConfigError, StateError, engines_are_made_by
from shardwise.init import materialize
from shardwise.integrations.accelerate_batches import BatchSharingAccelerator, ranks_per_batch
from shardwise.integrations.accelerate_coordination import Coordination
from shardwise.integrations.accelerate_fp8 import request_of
from shardwise.integrations.checkpoint_folders import STATE_FOLDER
from shardwise.integrations.model_patches import (
    engine_folder,
    gather_fused_heads,
    is_prepared,
    param_ids,
    patch_zero_grad,
    refuse_comm_hook,
    refuse_no_sync,
    refuse_other_engines,
    remove_patches,
    synchronize_generation,
    take_over,
)
from shardwise.integrations.plans import (
    PlanLike,
    dtype_of,
    has_stages,
    refuse_elastic_job,
    require_agreement,
    resolved_plan,
    with_fp8,
    without,
)
from shardwise.integrations.sample_batch import cure, sample_batch
from shardwise.system.process_rank import process_rank_of

_log = logging.getLogger("shardwise")

engines_are_made_by("Accelerate", "accelerator.engine_of(model)")


@dataclass(frozen=True)
class _Before:
    """A model before it was sharded."""

    dtype: str | None
    """`bf16` or `fp16` if all of it had that dtype: its files are written in it."""
    param_dtypes: Mapping[str, torch.dtype]
    prefix: str
    """What its names have before them in an engine that has several models."""


class Accelerator(BatchSharingAccelerator):
    """Accelerate's `Accelerator` whose `prepare` shards models by `plan`: a preset's name, a file, a dict or a `Plan`.

    `prepare`, `clip_grad_norm_`, `get_state_dict`, `save_state`, `load_state` and `free_memory` are collective: all
    ranks must call them. Prepare a model and its optimizer in one call, or one after the other. Models that are not
    trained are not sharded. Precision and compiler come from accelerate's `mixed_precision` and `dynamo_backend`,
    unless the plan sets them.

    With the preset `auto` in the plan, the fastest one that fits is chosen for a batch of the first loader that is
    prepared, in the same call as model and optimizer or before (docs/auto.md); or for `batch`, one micro-batch of a
    rank, as the model is called with it.

    Ranks along `tp`, `sp` and `pp` get the same batches. With `pp`, each call of the model splits its batch into parts,
    which pass through the stages (docs/pipeline.md). A model of transformers splits a batch along `sp` by itself, and
    returns the loss of the whole batch; for other models, call `engine.split_sequence` on each batch.

    Raises `ConfigError` for plugins of other engines.
    """

    _optimizers: list[Any]
    """accelerate's own list, of what it has prepared."""

    default_plan: PlanLike = "zero3"
    """The plan if `plan` is not given."""
    num_made: ClassVar[int] = 0
    """The number of instances that this process has created."""
    main_process_reads_alone: ClassVar[bool] = False
    """Whether the main process may read sharded models alone after `wait_for_everyone`, as unmodified scripts do."""

    def __init__(self, *args: Any, plan: PlanLike | None = None, batch: object = None, **kwargs: Any) -> None:
        loaded = sw.load_plan(self.default_plan if plan is None else plan)
        refuse_other_engines(kwargs)
        refuse_elastic_job("Accelerate, which transformers' Trainer uses,")
        self.ranks_per_batch = ranks_per_batch(loaded)
        super().__init__(*args, **kwargs)
        refuse_comm_hook(self.ddp_handler)
        Accelerator.num_made += 1
        require_agreement(
            loaded, "accumulate", loaded.accumulate, self.gradient_accumulation_steps, "gradient_accumulation_steps"
        )
        if loaded.clip_grad_norm is not None:
            limit = loaded.clip_grad_norm
            raise ConfigError(
                f"The plan sets clip_grad_norm {limit}, but with Accelerate the script clips. Leave it out of the "
                f"plan, and call accelerator.clip_grad_norm_(model.parameters(), {limit})."
            )
        self.plan = without(loaded, "accumulate")
        self._batch = batch
        self.training_loader: Any = None
        """The loader of which `preset: auto` takes a batch; `None` until one is prepared."""
        self.keeps_engines = False
        """Whether `free_memory` leaves models sharded, as Trainer needs between two runs of the same model."""
        self.num_micro_batches: int | None = None
        """Of a step, if another loop than accelerate's accumulates."""
        self.runs_whole_steps = False
        """Whether another loop gives the engine all micro-batches of a step in one call."""
        self.steps_are_schedules = False
        """Whether it does so in all steps but short ones: then `preset: auto` foresees schedules instead of calls."""
        self.deepspeed_config: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None
        """Of a job that is started for `deepspeed --autotuning`: the script's, and values for its `"auto"`."""
        self._compiler = self._take_compiler()
        self.reference_kind: type[nn.Module] | None = None
        """Models of this class that are prepared in evaluation mode are references of one that is trained: pipeline
        stages have their parts too."""
        self._engines: dict[nn.Module, sw.Engine] = {}
        """Models that one optimizer trains together have the same engine."""
        self._before: dict[nn.Module, _Before] = {}
        self._references: dict[nn.Module, sw.Engine] = {}
        self._coordination = Coordination(self._engines)
        self._pending: list[nn.Module] = []
        self._own_world: sw.World | None = None
        self._fp8 = request_of(self) if self.mixed_precision == "fp8" else None
        for note in self._fp8.notes if self._fp8 is not None and self.is_main_process else ():
            _log.warning("fp8: %s.", note)
        self.scaler = None  # the engine has its own loss scale, which is the same on all ranks

    @property
    def plan_precision(self) -> str:
        """accelerate's `mixed_precision`, as a plan has it: under fp8, everything but some products is in bf16."""
        return "bf16" if self.mixed_precision == "fp8" else str(self.mixed_precision)

    @property
    def fp8_backend(self) -> FP8BackendType:
        """None of accelerate's: layers multiply in fp8 as the plan says, and `prepare` must not convert them."""
        return FP8BackendType.NO

    def _take_compiler(self) -> str | None:
        """Returns the requested compiler backend, and turns off accelerate's compilation of whole models: the engine
        compiles its units."""
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            return None
        if plugin.mode not in (None, "default") or plugin.fullgraph or plugin.dynamic:
            raise ConfigError(
                "The options mode, fullgraph and dynamic of torch.compile are for whole models, but the engine "
                "compiles each unit separately. Leave them out."
            )
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        return str(backend.value).lower()

    @property
    def world(self) -> sw.World:
        """The world of ranks, joined at first use. Raises `ConfigError` if accelerate sees another number of ranks."""
        if self._own_world is None:
            launched = process_rank_of(os.environ).size
            if self.num_processes != launched:
                raise ConfigError(
                    f"{launched} ranks were launched, but Accelerate sees {self.num_processes}. Without a GPU it must "
                    f"be set to use the CPU: pass cpu=True to Accelerator, or use_cpu=True to TrainingArguments, or "
                    f"set ACCELERATE_USE_CPU=true."
                )
            self._own_world = sw.World.join()
        return self._own_world

    def engine_of(self, model: nn.Module) -> sw.Engine | None:
        """The engine of a prepared model, also of a reference; `None` if it is not sharded."""
        return self._engines.get(model, self._references.get(model))

    def dtype_before(self, model: nn.Module) -> Any:
        """`bf16` or `fp16` if the model had that dtype before `prepare`: its files are written in it."""
        known = self._before.get(model)
        return None if known is None else known.dtype

    def in_dtypes_before(self, model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """The `state` of a model, each parameter in the dtype that it had before `prepare`. What is one tensor under
        two names stays one."""
        dtypes = self._before[model].param_dtypes if model in self._before else {}
        given = {
            id(one): one.to(dtypes.get(name, one.dtype)) for name, one in reversed(state.items()) if name in dtypes
        }
        return {name: given.get(id(one), one) for name, one in state.items()}

    # -- prepare ----------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See accelerate. Shards each trained model, together with the optimizers of its parameters."""
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        if self.training_loader is None:
            self.training_loader = next((one for one in args if isinstance(one, DataLoader)), None)
        for model in models:
            self._take_over(model, optimizers)
        self._shard(models, [one for one in optimizers if not isinstance(one, AcceleratedOptimizer)])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See accelerate. A trained model is sharded when its optimizer is prepared."""
        self._take_over(model)
        if evaluation_mode and type(model) is self.reference_kind and has_stages(self.plan):
            self._place_reference(model)
        is_trained = not evaluation_mode and any(param.requires_grad for param in model.parameters())
        if is_trained and model not in self._engines and model not in self._pending:
            self._pending.append(model)
        if model in self._engines or model in self._pending or model in self._references:
            device_placement = False
        else:
            materialize(model)  # it will not be sharded, but may have been built without values
        # evaluation_mode: autocast, and no wrapper
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def _take_over(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """If another Accelerator has sharded `model`, let it make that a plain one again."""
        if model in self._engines or model in self._references or not is_prepared(model):
            return
        own = {id(param) for param in model.parameters()}
        has_foreign = any(isinstance(one, AcceleratedOptimizer) and own & param_ids(one) for one in optimizers)
        if has_foreign or not take_over(model):
            raise ConfigError(
                f"{type(model).__name__} was prepared before, by another Accelerator of this process, and is sharded. "
                f"Give this one a new optimizer, not the prepared one."
            )

    def _place_reference(self, model: nn.Module) -> None:
        """Split `model`, which is only evaluated, as the plan says for the one that is trained beside it."""
        if model in self._references:
            return
        plan = without(self._plan_of(model), "run", "trackers")  # the record is that of the training
        if plan.preset == "auto":  # there is nothing to choose for what is not trained; this one holds least
            plan = sw.load_plan(without(plan, "budget"), ["preset=zero3"])
        plan = resolved_plan(plan, model, self.plan_precision, self._compiler, "Accelerate")
        gather_fused_heads(model, plan)
        device = None if self.device.type == "cpu" else self.device
        engine = sw.shard(model.requires_grad_(False), plan, world=self.world, device=device)
        patch_zero_grad(model, engine, engine.unshard)
        self._references[model] = engine

    def hand_over(self, model: nn.Module) -> None:
        """Close the engine of `model`, and leave plain parameters, whole on every rank, in their dtypes of before. All
        ranks call. See [Note: one Trainer after another] in `model_patches.py`."""
        engine = self._engines[model]
        engine.unshard()
        for one in [one for one, its in self._engines.items() if its is engine]:
            dtypes = self._before[one].param_dtypes
            self._release(one)
            for name, param in one.named_parameters():
                param.data = param.data.to(dtypes.get(name, param.dtype))

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """See accelerate. The first one is that of training: see `preset: auto`."""
        if self.training_loader is None:
            self.training_loader = data_loader
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """See accelerate. Optimizer states stay where the plan places them."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            self._shard([], [optimizer])
            device_placement = False
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if any(engine.plan.takes_only_finite for engine in self._engines.values()):
            self._report_overflow(prepared)
        return prepared

    def _report_overflow(self, prepared: AcceleratedOptimizer) -> None:
        """Lets schedulers see which steps were skipped."""

        def note(*_: object) -> None:
            norms = [engine.gradient_norm for engine in self._engines.values() if engine.plan.takes_only_finite]
            prepared._is_overflow = any(norm is not None and not math.isfinite(norm) for norm in norms)

        prepared.optimizer.register_step_post_hook(note)

    def _plan_of(self, model: nn.Module) -> sw.Plan:
        """The plan for `model`."""
        return self.plan

    def _shard(self, models: Iterable[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Shard those of `models`, and of the ones prepared before, whose parameters are in `optimizers`."""
        candidates = [*self._pending, *(model for model in models if model not in self._pending)]
        for together, mine in _trained_together([one for one in candidates if one not in self._engines], optimizers):
            self._shard_models(together, mine)

    def _shard_models(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        """Shard `models`, of which each of the `optimizers` trains one or several, as one. All ranks call."""
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        _refuse_shared_optimizers(model, optimizers)
        for number, one in enumerate(models):
            prefix = f"{number}." if len(models) > 1 else ""
            self._before[one] = _Before(dtype_of(one), {name: p.dtype for name, p in one.named_parameters()}, prefix)
        plan = self._resolved(model)
        if len(models) > 1 and (has_stages(plan) or plan.preset == "auto"):
            names = " and ".join(type(one).__name__ for one in models)
            raise ConfigError(
                f"{type(optimizers[0]).__name__} trains {names} together, and pipeline stages and preset: auto are for "
                f"one model that is called. Create one optimizer per model, or take another plan."
            )
        device = None if self.device.type == "cpu" else self.device
        self._coordination.release()
        if plan.preset == "auto":
            plan = self._chosen(model, plan, optimizers, device)
        gather_fused_heads(model, plan)
        if self.runs_whole_steps:
            plan = sw.load_plan(plan, [f"accumulate={self.num_micro_batches}"])
        tuner = None if self.deepspeed_config is None else _tuner(*self.deepspeed_config, model, optimizers[0])
        engine = sw.shard(model, plan, optimizer=optimizers, world=self.world, device=device)
        if tuner is not None:
            tuner.watch(model, self.world)
        engine.give_whole_outputs()
        self.draw_alike(self.world)
        records = plan.run is not None and not self.keeps_engines
        for one in models:
            self._engines[one] = engine
            patch_zero_grad(one, engine, partial(self.hand_over, one))
            refuse_no_sync(one)
            self._coordination.register(one, main_process_reads_alone=self.main_process_reads_alone, records=records)
            if self.num_processes > 1:
                synchronize_generation(one)
            if one in self._pending:
                self._pending.remove(one)

    def _resolved(self, model: nn.Module) -> sw.Plan:
        """The plan for `model`, with what accelerate's own settings say."""
        plan = self._plan_of(model)
        if self._fp8 is not None:
            plan = with_fp8(plan, self._fp8.settings(model))
        plan = resolved_plan(plan, model, self.plan_precision, self._compiler, "Accelerate")
        if plan.precision == "fp16" and self._engines:
            raise ConfigError(
                "In fp16 each engine has its own loss scale, so only one model can be trained. Use bf16 for several "
                "models."
            )
        return plan

    def _chosen(
        self, model: nn.Module, plan: sw.Plan, optimizers: list[torch.optim.Optimizer], device: torch.device | None
    ) -> sw.Plan:
        """`plan` with what `preset: auto` stands for, for as many micro-batches as are accumulated."""
        batch = self._batch
        if batch is None:
            loader = self.training_loader
            if loader is None:
                raise ConfigError(
                    f"preset: auto needs a batch, but no loader has been prepared. Prepare it in the same call, "
                    f"accelerator.prepare(model, optimizer, loader), or before. {cure('Accelerator')}"
                )
            num_readers = self.num_processes // self.ranks_per_batch
            batch = sample_batch(model, loader, num_parts=num_readers if self.split_batches else 1)
        counted = sw.load_plan(plan, [f"accumulate={self.num_micro_batches or self.gradient_accumulation_steps}"])
        chosen = sw.choose_plan(
            model,
            counted,
            batch=batch,
            optimizer=optimizers,
            world=self.world,
            device=device,
            as_call=not self.steps_are_schedules,
        )
        return without(chosen, "accumulate")

    # -- a step -----------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """See accelerate. Ranks synchronize here before each step, in case one of them saves."""
        if self.sync_gradients and self.num_processes > 1:
            self._coordination.synchronize()
        with super().accumulate(*models):
            yield

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """See accelerate. Sharded gradients are reduced nevertheless, because no rank can store them whole."""
        engine = None if model is None else self._engines.get(model)
        if engine is None or engine.table.grad.shard or self.runs_whole_steps:
            yield
            return
        with engine.no_sync():
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """See accelerate."""
        if self._pending:
            raise StateError(
                f"{type(self._pending[0]).__name__} was prepared without its optimizer, so it is not trained. Call "
                f"model, optimizer = accelerator.prepare(model, optimizer)."
            )
        scaled = [engine for engine in self._engines.values() if engine.scaler is not None]
        if scaled:
            kwargs.pop("learning_rate", None)
            total: Any = scaled[0].scale(loss / self.gradient_accumulation_steps)
            total.backward(**kwargs)
        else:
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Does nothing: the engine unscales gradients before they are read."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """See accelerate. Collective. Returns the global norm before clipping, a tensor on the CPU."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, given))
        for engine in self._engines.values():
            params = list(engine.module.parameters())
            if ids in (set(map(id, params)), {id(param) for param in params if param.requires_grad}):
                return torch.tensor(float(engine.clip_grad_norm_(max_norm, norm_type)), device="cpu")
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """See accelerate. Only for models that are not sharded."""
        if any(model in self._engines for model in joinables) and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs() needs DistributedDataParallel. Keep even_batches=True, which gives all ranks the "
                "same number of batches."
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    # -- saving and loading -----------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict of a prepared model, on the CPU of rank 0; `{}` on the others. Collective."""
        engine = self._engines.get(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        if self._coordination.is_saving:
            return self._coordination.placeholder
        self._coordination.release()
        prefix, whole = self._before[model].prefix, engine.state_dict(rank_0_only=True)
        return {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """See accelerate. Models and optimizers go into the subfolder `shardwise/`, which any number of ranks can load.

        The main process may call it alone; the other ranks join at their next `accumulate`. Hooks also get sharded
        models, which are whole on each rank while the hooks run.
        """

        def save() -> Any:
            with self._plain_optimizers():
                hook = self.register_save_state_pre_hook(self._coordination.remove_placeholders)
                try:
                    return super(Accelerator, self).save_state(output_dir, safe_serialization, **kwargs)
                finally:
                    hook.remove()

        return self._coordination.synchronize(save, has_hooks=bool(self._save_model_state_pre_hook))

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """See accelerate. Raises `ConfigError` for a folder that was written by plain Accelerate."""
        if self._engines and input_dir is not None:
            folder = Path(input_dir).expanduser()
            if folder.is_dir() and not (folder / STATE_FOLDER).is_dir():
                raise ConfigError(
                    f"{folder} was not saved by this Accelerator: it has no {STATE_FOLDER}/. Load its weights into the "
                    f"model before prepare(), and its optimizer states with optimizer.load_state_dict()."
                )
        self._coordination.release()
        with self._plain_optimizers():
            hook = self.register_load_state_pre_hook(self._load_engines)
            try:
                super().load_state(input_dir, load_kwargs, **kwargs)
            finally:
                hook.remove()

    @contextmanager
    def _plain_optimizers(self) -> Iterator[None]:
        """Inside, accelerate sees only the optimizers without an engine."""
        optimizers = self._optimizers
        sharded = {id(param) for model in self._engines for param in model.parameters()}
        self._optimizers = [one for one in optimizers if not sharded & param_ids(one)]
        try:
            yield
        finally:
            self._optimizers = optimizers

    def _load_engines(self, models: list[nn.Module], folder: str) -> None:
        """The last pre-hook of loading. Loads the models with engines, and leaves the others to accelerate."""
        models[:] = [model for model in models if model not in self._engines]
        for number, engine in enumerate(dict.fromkeys(self._engines.values())):
            if engine.resume(engine_folder(folder, number)) is None:
                raise StateError(f"{folder} has no checkpoint of model {number}; was it saved with fewer models?")

    # -- ranks that wait for each other -----------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """See accelerate."""
        if self._coordination.is_saving or self.keeps_engines:
            super().wait_for_everyone()
            return
        if self.num_processes > 1:
            self._coordination.synchronize()
        super().wait_for_everyone()
        if self.main_process_reads_alone:
            self._coordination.allow_reading_alone()

    @property
    def is_main_process(self) -> bool:
        """See accelerate."""
        self._coordination.read()
        return bool(super().is_main_process)

    # -- logging ----------------------------------------------------------------------------------------

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """See accelerate. Called by all ranks, or by the main process alone.

        If the plan has `run`, the numbers also go to its record and trackers, at the engine's step: as kind `step` for
        the first call after a step of the first model, as `validation` if the names begin with `eval_` or `val_`, and
        as `log` otherwise.
        """
        super().log(values, step, {} if log_kwargs is None else log_kwargs)
        record = self._coordination.logging
        if record is not None and not self.keeps_engines and record.engine.world.rank == 0:
            record.add(values)

    # -- the end ----------------------------------------------------------------------------------------

    def release(self, *keep: nn.Module) -> None:
        """Close the engines of all models except `keep`. Collective. Parameters are not whole afterwards."""
        if not self.keeps_engines:
            self._coordination.synchronize()
        for model in [model for model in self._engines if model not in keep]:
            self._release(model)

    def _release(self, model: nn.Module) -> None:
        remove_patches(model)
        self._coordination.unregister(model)
        engine = self._engines.pop(model)
        if engine not in self._engines.values():
            engine.close()
        self._before.pop(model, None)

    def _release_references(self) -> None:
        for model in list(self._references):
            remove_patches(model)
            self._references.pop(model).close()

    def free_memory(self, *objects: Any) -> Any:
        """See accelerate. Closes engines; call `get_state_dict` before if you need the weights."""
        if not self.keeps_engines:
            self._pending.clear()
            self.release()
            self._release_references()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """See accelerate."""
        self.release()
        self._release_references()
        world, self._own_world = self._own_world, None
        if world is not None:
            world.close()
        super().end_training()


def _tuner(
    config: Mapping[str, Any], auto: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> Any:
    from shardwise.integrations.deepspeed.autotuning import Tuner  # only these jobs load the planner

    return Tuner(config, model, optimizer, auto)


def _trained_together(
    models: Iterable[nn.Module], optimizers: list[torch.optim.Optimizer]
) -> list[tuple[list[nn.Module], list[torch.optim.Optimizer]]]:
    """`models` that are trained, those of one optimizer together, with the optimizers of each such group."""
    groups: list[tuple[list[nn.Module], list[torch.optim.Optimizer]]] = []
    for model in models:
        own = {id(param) for param in model.parameters() if param.requires_grad}
        mine = [one for one in optimizers if own & param_ids(one)]
        if not mine:
            continue
        linked = [group for group in groups if any(one in mine for one in group[1])]
        groups = [group for group in groups if group not in linked]
        of_models = [one for group in linked for one in group[0]]
        of_optimizers = dict.fromkeys([*(one for group in linked for one in group[1]), *mine])
        groups.append(([*of_models, model], list(of_optimizers)))
    return groups


def _refuse_shared_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    own = {id(param) for param in model.parameters()}
    for one in optimizers:
        if not param_ids(one) <= own:
            raise ConfigError(
                f"{type(one).__name__} has parameters of {type(model).__name__} and of modules that are not prepared "
                f"with it. Prepare all that it trains in one call, prepare(first, second, optimizer), or create one "
                f"optimizer per model. Where a Trainer makes the optimizer for a loss that has parameters, make them "
                f"the model's before: model.loss_head = loss.head."
            )
