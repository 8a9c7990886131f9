"""Loops of Hugging Face Accelerate over our engine: `Accelerator(plan="zero3")` in the place of accelerate's own.

What `prepare` is given stays the same object: the model is sharded, not wrapped, and the optimizer updates this rank's
pieces. Everything that accelerate does with batches, trackers and metrics is accelerate's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, StateError
from shardwise.init import materialize
from shardwise.integrations.accelerate_logging import LoggingAccelerator
from shardwise.integrations.accelerate_saving import SavingAccelerator
from shardwise.integrations.batches import DealingAccelerator, copies_of_a_batch
from shardwise.integrations.plans import PlanLike, dtype_of, require_agreement, require_no_stages, settled, without
from shardwise.integrations.preparing import (
    generate_in_step,
    ids_of,
    refuse_engines,
    refuse_no_sync,
    zero_apart,
    zero_together,
)
from shardwise.integrations.together import Together
from shardwise.places import place_of


class Accelerator(LoggingAccelerator, SavingAccelerator, DealingAccelerator):
    """Accelerate's `Accelerator` whose `prepare` shards models by `plan`: a preset's name, a file, a dict or a `Plan`.

    All ranks call `prepare`, `clip_grad_norm_`, `get_state_dict`, `save_state`, `load_state` and `free_memory`. A model
    is prepared with its optimizer, together or one after the other; models that are not trained stay plain. Precision
    and compiler come from accelerate's `mixed_precision` and `dynamo_backend`, unless the plan sets them.

    Ranks along `tp` and `sp` are given the same batches. A model of transformers splits a batch along `sp` by itself,
    and returns the loss of the whole; others are given what `engine.split_sequence` makes of one.

    Raises `ConfigError` for a plan with stages (axis pp), and for plugins of other engines.
    """

    default_plan: PlanLike = "zero3"
    """What counts where `plan` is not given."""
    num_made: ClassVar[int] = 0
    """How many there have been in this process."""

    def __init__(self, *args: Any, plan: PlanLike | None = None, **kwargs: Any) -> None:
        loaded = sw.load_plan(self.default_plan if plan is None else plan)
        refuse_engines(kwargs)
        require_no_stages(loaded, "Accelerate")
        self.copies_of_a_batch = copies_of_a_batch(loaded)
        super().__init__(*args, **kwargs)
        Accelerator.num_made += 1
        require_agreement(
            loaded, "accumulate", loaded.accumulate, self.gradient_accumulation_steps, "gradient_accumulation_steps"
        )
        if loaded.clip_grad_norm is not None:
            limit = loaded.clip_grad_norm
            raise ConfigError(
                f"The plan says clip_grad_norm {limit}, and a loop of Accelerate clips by itself. Leave it out of the "
                f"plan, and call accelerator.clip_grad_norm_(model.parameters(), {limit})."
            )
        self.plan = without(loaded, "accumulate")
        self.keeps_engines = False
        """Whether `free_memory` leaves models sharded, for whoever calls it between two runs of the same model."""
        self._compiler = self._taken_compiler()
        self._engines: dict[nn.Module, sw.Engine] = {}
        self._dtypes: dict[nn.Module, str | None] = {}
        self._together = Together(self._engines)
        self._pending: list[nn.Module] = []
        self._own_world: sw.World | None = None
        self.scaler = None  # the engine has a loss scale of its own, in agreement of all ranks

    def _taken_compiler(self) -> str | None:
        """The backend that was asked for, which from now on compiles units of the engine and no whole models."""
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            return None
        if plugin.mode not in (None, "default") or plugin.fullgraph or plugin.dynamic:
            raise ConfigError(
                "torch.compile with mode, fullgraph or dynamic is for whole models; a plan compiles its units one by "
                "one. Leave these out."
            )
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        return str(backend.value).lower()

    @property
    def world(self) -> sw.World:
        """The ranks, met when this is first asked for. Raises `ConfigError` if accelerate sees others."""
        if self._own_world is None:
            launched = place_of(os.environ).size
            if self.num_processes != launched:
                raise ConfigError(
                    f"{launched} ranks were launched, but Accelerate sees {self.num_processes}: without an accelerator "
                    f"it has to be told. Pass cpu=True to Accelerator, or use_cpu=True to TrainingArguments, or set "
                    f"ACCELERATE_USE_CPU=true."
                )
            self._own_world = sw.World.join()
        return self._own_world

    def engine_of(self, model: nn.Module) -> sw.Engine | None:
        """The engine of a prepared model; `None` for one that is not sharded."""
        return self._engines.get(model)

    def dtype_before(self, model: nn.Module) -> Any:
        """`bf16` or `fp16` if the model had that when it was prepared: what its files are written in."""
        return self._dtypes.get(model)

    # -- prepare ----------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """See accelerate. Shards each model that is trained, with those of the optimizers that are over it."""
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        self._shard(models, [one for one in optimizers if not isinstance(one, AcceleratedOptimizer)])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """See accelerate. A model that is trained is sharded once its optimizer is prepared."""
        is_trained = not evaluation_mode and any(param.requires_grad for param in model.parameters())
        if is_trained and model not in self._engines and model not in self._pending:
            self._pending.append(model)
        if model in self._engines or model in self._pending:
            device_placement = False
        else:
            materialize(model)  # one that nobody shards, if it was built without values
        # evaluation_mode: autocast, and no wrapper
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """See accelerate. Its states stay where the plan has them."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            self._shard([], [optimizer])
            device_placement = False
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if any(engine.scaler is not None for engine in self._engines.values()):
            self._tell_of_overflow(prepared)
        return prepared

    def _tell_of_overflow(self, prepared: AcceleratedOptimizer) -> None:
        """In fp16: let schedulers know of steps that were not taken."""

        def note(*_: object) -> None:
            norms = [engine.gradient_norm for engine in self._engines.values() if engine.scaler is not None]
            prepared._is_overflow = any(norm is not None and not math.isfinite(norm) for norm in norms)

        prepared.optimizer.register_step_post_hook(note)

    def _plan_of(self, model: nn.Module) -> sw.Plan:
        """What `model` is sharded by."""
        return self.plan

    def _shard(self, models: Iterable[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        candidates = [*self._pending, *(model for model in models if model not in self._pending)]
        for model in candidates:
            own = {id(param) for param in model.parameters() if param.requires_grad}
            mine = [one for one in optimizers if own & ids_of(one)]
            if not own or model in self._engines or not mine:
                continue
            for one in mine:
                if not ids_of(one) <= {id(param) for param in model.parameters()}:
                    raise ConfigError(
                        f"{type(one).__name__} has parameters of {type(model).__name__} and others. Give each model an "
                        f"optimizer of its own, or make one module of them before prepare()."
                    )
            self._dtypes[model] = dtype_of(model)
            plan = settled(self._plan_of(model), model, self.mixed_precision, self._compiler, "Accelerate")
            if plan.precision == "fp16" and self._engines:
                raise ConfigError("In fp16 every engine has a loss scale of its own. Take bf16 for several models.")
            device = None if self.device.type == "cpu" else self.device
            self._together.leave()
            self._engines[model] = sw.shard(model, plan, optimizer=mine, world=self.world, device=device)
            self._engines[model].give_whole_outputs()
            zero_together(model, self._engines[model])
            refuse_no_sync(model)
            records = plan.run is not None and not self.keeps_engines
            self._together.follow(model, reads_alone=self.reads_alone, records=records)
            if self.num_processes > 1:
                generate_in_step(model)
            if model in self._pending:
                self._pending.remove(model)

    # -- a step -----------------------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """See accelerate. Ranks meet here before each step, in case one of them saves."""
        if self.sync_gradients and self.num_processes > 1:
            self._together.meet()
        with super().accumulate(*models):
            yield

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """See accelerate. Gradients that the plan keeps in shards are reduced all the same; there is no other place."""
        engine = None if model is None else self._engines.get(model)
        if engine is None or engine.table.grad.shard:
            yield
            return
        with engine.no_sync():
            yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """See accelerate."""
        if self._pending:
            raise StateError(
                f"{type(self._pending[0]).__name__} was prepared without its optimizer, so nothing trains it. Call "
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
        """The engine takes its loss scale out of gradients before anybody reads them."""

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """See accelerate. All ranks call; returns the global norm before clipping, a tensor on the CPU."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = set(map(id, given))
        for model, engine in self._engines.items():
            if ids == {id(param) for param in model.parameters()} or ids == {
                id(param) for param in model.parameters() if param.requires_grad
            }:
                return torch.tensor(float(engine.clip_grad_norm_(max_norm, norm_type)))
        return nn.utils.clip_grad_norm_(given, max_norm, norm_type)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """See accelerate; for models that are not sharded only."""
        if any(model in self._engines for model in joinables) and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs() is DistributedDataParallel's own. Keep even_batches=True, by which all ranks "
                "have as many batches."
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

    # -- the end ----------------------------------------------------------------------------------------

    def release(self, *keep: nn.Module) -> None:
        """Close the engines of all models but `keep`. All ranks call. A model's parameters are no longer whole then."""
        if not self.keeps_engines:
            self._together.meet()
        for model in [model for model in self._engines if model not in keep]:
            zero_apart(model)
            self._together.forget(model)
            self._engines.pop(model).close()
            self._dtypes.pop(model, None)

    def free_memory(self, *objects: Any) -> Any:
        """See accelerate. Closes engines; take what you need of a model (`get_state_dict`) before."""
        if not self.keeps_engines:
            self._pending.clear()
            self.release()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """See accelerate."""
        self.release()
        world, self._own_world = self._own_world, None
        if world is not None:
            world.close()
        super().end_training()
