"""A strategy of Lightning's Fabric whose models, gradient norms and checkpoints are handled by the engine.

Ranks, devices, launching and communication are those of Fabric's DDPStrategy.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.init import is_deferred
from shardwise.integrations.lightning_parts import fabric_states
from shardwise.integrations.lightning_parts.checkpoints import refuse_storage_options
from shardwise.integrations.lightning_parts.precision import refuse_scaler
from shardwise.integrations.lightning_parts.settings import FOR_FP8, PRECISIONS, refuse_settings
from shardwise.integrations.lightning_parts.strategy import StrategyMixin
from shardwise.integrations.lightning_parts.worlds import WORLDS, InWorld
from shardwise.integrations.model_patches import param_ids, patch_zero_grad
from shardwise.integrations.plans import PlanLike, resolved_plan
from shardwise.integrations.sample_batch import cure, sample_batch


class FabricStrategyMixin(InWorld):
    """A mixin for Fabric's DDPStrategy that shards models in place by `plan` when they are set up.

    `plan` is a preset's name, a file, a dict or a `sw.Plan`; the default is `zero3`. With `state_dict_type="sharded"`
    `fabric.save` writes a folder: each rank writes its part, and any number of ranks can load it. With `"full"`, or
    with a `filter`, it writes a single file like DDP. Other arguments are those of DDPStrategy for devices and
    launching. Ranks along the axes `tp`, `sp` and `pp` of the plan's mesh get the same batches.

    With the preset `auto` in the plan, the fastest one that fits is chosen for a batch of the first loader that is set
    up, before the model (docs/auto.md); or for `batch`, one micro-batch of a rank as the model is called with it.

    A model is sharded by `fabric.setup(model, optimizer)`, or by `setup_optimizers` after `setup_module`. Raises
    `ConfigError` for a plan with `accumulate` or `clip_grad_norm`, which a Fabric loop does itself.
    """

    default_plan: ClassVar[PlanLike] = "zero3"
    """The plan if `plan` is not given."""

    def __init__(
        self,
        plan: PlanLike | None = None,
        *,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        batch: object = None,
        **settings: Any,
    ) -> None:
        self.plan = sw.load_plan(self.default_plan if plan is None else plan)
        self._batch = batch
        self._training_loader: Any = None
        refuse_settings(state_dict_type, settings)
        for name, plain in (("accumulate", 1), ("clip_grad_norm", None)):
            if getattr(self.plan, name) is not plain:
                raise ConfigError(
                    f"The plan sets {name} {getattr(self.plan, name)}, but with Fabric the training loop does this. "
                    f"Leave it out of the plan, and use fabric.no_backward_sync() and fabric.clip_gradients()."
                )
        super().__init__(**settings)
        StrategyMixin.num_made += 1
        self._state_dict_type = state_dict_type
        self._engines: dict[nn.Module, sw.Engine] = {}
        self._pending: list[nn.Module] = []
        self._backward_sync_control = _SyncControl(self._engines)

    def engine_of(self, model: nn.Module) -> sw.Engine | None:
        """The engine of a model that was given to or returned by `fabric.setup`; `None` if it is not sharded."""
        return self._engines.get(getattr(model, "module", model), self._engines.get(model))

    # -- setup ------------------------------------------------------------------------------------------

    def module_to_device(self, module: nn.Module) -> None:
        """Does nothing: the engine moves the model, part by part."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Inside, constructors are recorded, and parameters are created later where the plan places them.

        With `bf16-true`, `16-true` and `64-true` Fabric casts each model before it is set up, so it must have values.
        """
        if self.precision.precision in ("bf16-true", "16-true", "64-true"):
            whole: AbstractContextManager[Any] = super().module_init_context(empty_init)
            return whole
        stack = ExitStack()
        stack.enter_context(self.precision.module_init_context())
        stack.enter_context(sw.deferred_init())
        return stack

    def setup_module(self, module: nn.Module) -> nn.Module:
        """See Fabric. A trained model is sharded when its optimizer is set up."""
        params = list(module.parameters())
        if any(param.requires_grad for param in params):
            self._pending.append(module)
        if not any(param.is_meta or is_deferred(param) for param in params):
            module.to(self.root_device)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See Fabric. Collective. Shards the model whose parameters the optimizer has."""
        for module in self._pending:
            if {id(param) for param in module.parameters()} & param_ids(optimizer):
                self._pending.remove(module)
                self._shard(module, [optimizer])
                return optimizer
        if fabric_states.owner_of(optimizer, self._engines) is not None:
            raise ConfigError(
                f"The model of this {type(optimizer).__name__} is already sharded with another optimizer. Pass both to "
                f"fabric.setup(model, first, second)."
            )
        return optimizer

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any], scheduler: Any = None) -> Any:
        """See Fabric. Collective."""
        self._shard(module, optimizers)
        return module, optimizers, scheduler

    def _shard(self, module: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        name = getattr(self.precision, "precision", "32-true")
        if name not in PRECISIONS or name == "16-true":
            known = [repr(one) for one in PRECISIONS if one != "16-true"]
            raise ConfigError(f"precision {name!r} is not supported with Fabric. Use {', '.join(known)}.{FOR_FP8}")
        plan = resolved_plan(self.plan, module, PRECISIONS[name], None, "Fabric")
        if plan.precision == "fp16" and self._engines:
            raise ConfigError(
                "In fp16 each engine has its own loss scale, so only one model can be trained. Use bf16 for several "
                "models."
            )
        refuse_scaler(self.precision, plan)
        device = None if self.root_device.type == "cpu" else self.root_device
        if plan.preset == "auto":
            batch = self._batch_of(module) if self._batch is None else self._batch
            plan = sw.choose_plan(
                module, plan, batch=batch, optimizer=optimizers, world=self.world, device=device, as_call=True
            )
        engine = sw.shard(module, plan, optimizer=optimizers, world=self.world, device=device)
        WORLDS.use(self.world, engine)
        self._engines[module] = engine
        patch_zero_grad(module, engine)
        if engine.scaler is not None:
            self.precision.scaler = _EngineScaler(engine)

    def process_dataloader(self, dataloader: Any) -> Any:
        """See Fabric. The first one is that of training: see `preset: auto`."""
        if self._training_loader is None:
            self._training_loader = dataloader
        return super().process_dataloader(dataloader)

    def _batch_of(self, module: nn.Module) -> object:
        if self._training_loader is None:
            raise ConfigError(
                f"preset: auto needs a batch, but no loader has been set up. Call fabric.setup_dataloaders(loader) "
                f"before fabric.setup(model, optimizer). {cure('ShardwiseStrategy')}"
            )
        return sample_batch(module, self._training_loader, door="ShardwiseStrategy")

    # -- a step -----------------------------------------------------------------------------------------

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """See Fabric. Collective. Returns the global norm before clipping, a tensor on the CPU."""
        engine = self.engine_of(module)
        trained = {id(param) for param in module.parameters() if param.requires_grad}
        if engine is None or not trained <= param_ids(optimizer):
            clipped: torch.Tensor = super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
            return clipped
        norm = float(engine.clip_grad_norm_(max_norm, norm_type))
        if error_if_nonfinite and engine.scaler is None and not math.isfinite(norm):
            raise RuntimeError(
                f"The norm of the gradients is {norm}. Pass error_if_nonfinite=False to fabric.clip_gradients to "
                f"continue."
            )
        return torch.tensor(norm, device="cpu")

    # -- state ------------------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """See Fabric: the whole state dict, on all ranks. Collective."""
        engine = self.engine_of(module)
        state: dict[str, Any] = super().get_module_state_dict(module) if engine is None else engine.state_dict()
        return state

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """See Fabric. Collective, with the same values on all ranks."""
        engine = self.engine_of(module)
        if engine is None or not engine.mesh.parted_axes:
            super().load_module_state_dict(module, state_dict, strict)
        else:
            engine.load_state_dict(state_dict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> Any:
        """See Fabric: the whole state, on all ranks. Collective."""
        engine = fabric_states.owner_of(optimizer, self._engines)
        if engine is None or not engine.mesh.parted_axes:
            return super().get_optimizer_state(optimizer)
        return engine.optimizer_state_dict()

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """See Fabric. Collective."""
        is_sharded = any(one in self._engines for one in state.values() if isinstance(one, nn.Module))
        if not is_sharded or self._state_dict_type == "full" or filter:
            super().save_checkpoint(path, state, storage_options, filter)
            return
        refuse_storage_options(storage_options)
        fabric_states.save(Path(self.broadcast(str(path))), state, self._engines, self.world)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """See Fabric. Collective. Also reads single files written by any strategy of Fabric."""
        folder = Path(self.broadcast(str(path)))
        if fabric_states.is_sharded(folder):
            return fabric_states.load(folder, state, self._engines, strict=strict, weights_only=weights_only)
        if isinstance(state, dict):
            loads = fabric_states.with_whole_states(state, self._engines)
            rest: dict[str, Any] = super().load_checkpoint(folder, loads, strict, weights_only)
            state.update({name: one for name, one in loads.items() if not fabric_states.is_stateful(state[name])})
            return rest
        return dict(super().load_checkpoint(folder, state, strict, weights_only))


class _SyncControl:
    """Implements `fabric.no_backward_sync`. Sharded gradients are reduced nevertheless."""

    def __init__(self, engines: dict[nn.Module, sw.Engine]) -> None:
        self._engines = engines

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        engine = self._engines.get(module)
        if not enabled or engine is None or engine.table.grad.shard:
            return nullcontext()
        return engine.no_sync()


class _EngineScaler:
    """Replaces a GradScaler: the engine has the loss scale, the same on all ranks, and skips steps itself."""

    def __init__(self, engine: sw.Engine) -> None:
        self._engine = engine

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self._engine.scale(loss)

    def step(self, optimizer: torch.optim.Optimizer, **settings: Any) -> Any:
        return optimizer.step(**settings)

    def update(self) -> None:
        """Does nothing: the step updates the loss scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Does nothing: the engine unscales gradients before they are read."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the loss scale is in the engine's checkpoint."""
