"""A strategy of Lightning's Trainer whose model, backward and checkpoints are handled by the engine.

Ranks, devices, launching and the reductions of `self.log(..., sync_dist=True)` are those of Lightning's DDPStrategy.
Checkpoints are sharded folders, or single files like those of DDP.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.lightning_parts import checkpoints
from shardwise.integrations.lightning_parts.auto import chosen_plan
from shardwise.integrations.lightning_parts.finetuning import add_saved_groups, forget_saved_groups
from shardwise.integrations.lightning_parts.precision import refuse_scaler, with_engine
from shardwise.integrations.lightning_parts.settings import (
    plan_for,
    refuse_settings,
    require_staged_settings,
)
from shardwise.integrations.lightning_parts.uneven_evaluation import UnevenEvaluation
from shardwise.integrations.lightning_parts.worlds import WORLDS, InWorld
from shardwise.integrations.model_patches import param_ids, patch_zero_grad, remove_patches
from shardwise.integrations.plans import PlanLike, has_stages

ENGINE = "_shardwise_engine"
"""The attribute of a LightningModule with its engine, which may outlive the Trainer that created it."""


def _call(optimizer: torch.optim.Optimizer, name: str, *args: Any, **kwargs: Any) -> Any:
    """A method that is looked up now: the engine replaces them, and again where it plans again."""
    return getattr(optimizer, name)(*args, **kwargs)


class StrategyMixin(InWorld):
    """A mixin for Lightning's DDPStrategy that shards the LightningModule in place by `plan`.

    `plan` is a preset's name, a file, a dict or a `sw.Plan`; the default is `zero3`. With `state_dict_type="sharded"`
    checkpoints are folders: each rank writes its part, and any number of ranks can load them. With `"full"` they are
    single files like those of DDP, whole in the memory of rank 0. Other arguments are those of DDPStrategy for devices
    and launching.

    With the preset `auto` in the plan, `fit` takes the fastest one that fits for a batch of the training loader
    (docs/auto.md), or for `batch`, one micro-batch of a rank as the module's forward is called with it; evaluations
    before `fit` take `zero3`.

    The module is sharded when `fit`, `validate`, `test` or `predict` begins, and stays sharded afterwards:
    `state_dict()`, `trainer.save_checkpoint` and further runs are collective. `release()` makes it a plain module
    again.

    Ranks along the axes `tp`, `sp` and `pp` of the plan's mesh get the same batches. In pipeline stages all ranks call
    the steps; what these call, the module itself or one in it with all stages, splits its batch among the stages
    (docs/pipeline.md). Raises `ConfigError` for settings of other engines.
    """

    strategy_name = "shardwise"
    default_plan: ClassVar[PlanLike] = "zero3"
    """The plan if `plan` is not given."""
    num_made: ClassVar[int] = 0
    """The number of instances that this process has created."""

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
        refuse_settings(state_dict_type, settings)
        if has_stages(self.plan):
            require_staged_settings(self.plan, state_dict_type)
        super().__init__(**settings)
        StrategyMixin.num_made += 1
        self._state_dict_type = state_dict_type
        self._placeholder: dict[str, Any] = {}
        self._uneven = UnevenEvaluation()

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        ours = None if plugin is None else with_engine(plugin)
        super(StrategyMixin, type(self)).precision_plugin.__set__(self, ours)

    # -- the engine -------------------------------------------------------------------------------------

    @property
    def engine(self) -> sw.Engine | None:
        """The engine of the LightningModule, once it is sharded."""
        module = self.lightning_module
        engine: sw.Engine | None = None if module is None else module.__dict__.get(ENGINE)
        return engine

    def setup(self, trainer: Any) -> None:
        """See Lightning. Collective. Shards the module, in `fit` with its optimizers."""
        self.accelerator.setup(trainer)
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm=True is not supported. Leave it out, and call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module) before fit: its batch norms then take the rows "
                "of all ranks."
            )
        module = self.lightning_module
        is_fit = trainer.state.fn == "fit"
        if is_fit or self.engine is None:
            plan = plan_for(self.plan, trainer, module, self.precision_plugin.precision)
            refuse_scaler(self.precision_plugin, plan)
            self.release()
            self._reset_optimizers_and_schedulers()
            if is_fit:
                self.setup_optimizers(trainer)
            if plan.preset == "auto":
                evaluated = sw.load_plan(plan, ["preset=zero3"])
                plan = chosen_plan(self, trainer, plan, self._batch) if is_fit else evaluated
            self._shard(module, plan)
        engine = self.engine
        assert engine is not None
        self.model = module
        self.precision_plugin.attach(engine, self.optimizers)
        self.setup_precision_plugin()
        self._bypass_wrappers()

    def _shard(self, module: nn.Module, plan: sw.Plan) -> None:
        own = {id(param) for param in module.parameters()}
        mine = [one for one in self.optimizers if own & param_ids(one)]  # without one, Lightning has a dummy
        device = None if self.root_device.type == "cpu" else self.root_device
        engine = sw.shard(module, plan, optimizer=mine or None, world=self.world, device=device)
        WORLDS.use(self.world, engine)
        module.__dict__[ENGINE] = engine
        patch_zero_grad(module, engine)

    def _bypass_wrappers(self) -> None:
        """Let Lightning's wrappers of optimizers call the methods that the engine has set on the optimizers. Otherwise
        they would run torch's methods, which go through the parameters one by one."""
        for wrapper in self._lightning_optimizers:
            for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
                wrapper.__dict__[name] = partial(_call, wrapper.optimizer, name)

    def release(self) -> None:
        """Make the module plain again, with whole parameters on every rank and no engine. Collective.

        Does nothing without an engine. Raises `ConfigError` for a module that is split along model axes.
        """
        engine, module = self.engine, self.lightning_module
        if engine is None:
            return
        if engine.mesh.parted_axes:
            raise ConfigError(
                f"The module is split along {' and '.join(engine.mesh.parted_axes)}, which cannot be undone. For "
                f"another fit() or a plain module create a new one, and load a checkpoint or "
                f"strategy.engine.state_dict()."
            )
        whole = engine.state_dict()
        del module.__dict__[ENGINE]
        remove_patches(module)
        engine.close()
        module.load_state_dict(whole)

    def model_to_device(self) -> None:
        """Does nothing: the engine moves the model, part by part."""

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Around `configure_model`: constructors are recorded, and parameters created later where the plan places
        them."""
        return sw.deferred_init()

    # -- steps ------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._call_step("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate_step("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate_step("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate_step("predict_step", args, kwargs)

    def _call_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a step as the module's `forward`, so that forward hooks run. In pipeline stages, and where it optimizes
        by hand, it calls forwards itself."""
        module = self.lightning_module
        step = getattr(module, name)
        if has_stages(self.plan) or (name == "training_step" and not module.automatic_optimization):
            return step(*args, **kwargs)
        before = module.__dict__.pop("forward", None)

        def plain() -> None:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before

        def forward(*inner: Any, **named: Any) -> Any:
            plain()
            return step(*args, **kwargs) if is_mixed else step(*inner, **named)

        is_mixed = self.precision_plugin.is_mixed
        module.__dict__["forward"] = forward
        try:
            return module() if is_mixed else module(*args, **kwargs)  # under autocast batches keep their dtype
        finally:
            plain()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """See Lightning. Sharded gradients are reduced nevertheless, because no rank can store them whole."""
        engine = self.engine
        if engine is None or engine.table.grad.shard:
            yield
            return
        with engine.no_sync():
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Does nothing: the model is not wrapped in DDP."""

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Does nothing: the model is not wrapped in DDP."""

    # -- evaluation -------------------------------------------------------------------------------------

    def _evaluate_step(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.engine is not None
        self._uneven.enter(self.engine)
        output = self._call_step(name, args, kwargs)
        if self._loop().batch_progress.is_last_batch:
            self._uneven.leave()
        return output

    def _loop(self) -> Any:
        trainer = self.lightning_module.trainer
        if trainer.predicting:
            return trainer.predict_loop
        if trainer.testing:
            return trainer.test_loop
        return trainer.fit_loop.epoch_loop.val_loop if trainer.state.fn == "fit" else trainer.validate_loop

    def _begin(self, stage: str) -> None:
        assert self.engine is not None
        self._uneven.begin(self.engine, self.lightning_module.trainer, stage)

    def _end(self) -> None:
        assert self.engine is not None
        self._uneven.join_without_batches(self.engine)

    def on_validation_start(self) -> None:
        self._begin("validate")

    def on_test_start(self) -> None:
        self._begin("test")

    def on_predict_start(self) -> None:
        self._begin("predict")

    def on_validation_end(self) -> None:
        self._end()

    def on_test_end(self) -> None:
        self._end()

    def on_predict_end(self) -> None:
        self._end()

    # -- checkpoints ------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> Any:
        """The whole state dict on rank 0 if checkpoints are `"full"`; otherwise a placeholder for `save_checkpoint`."""
        if self.engine is None:
            return super().lightning_module_state_dict()
        return self.engine.state_dict(rank_0_only=True) if self._state_dict_type == "full" else self._placeholder

    def optimizer_state(self, optimizer: Any) -> Any:
        """The whole state if checkpoints are `"full"`; otherwise empty. Collective."""
        if self.engine is not None and self._state_dict_type == "sharded":
            return {}
        split_engine = self._split_engine
        if split_engine is not None:
            self._require_one_optimizer()
            return split_engine.optimizer_state_dict(rank_0_only=True)
        return getattr(optimizer, "optimizer", optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See Lightning. Collective."""
        engine = self.engine
        if engine is None or self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(str(filepath)))
        if checkpoints.STATES not in checkpoint:  # only weights
            whole = engine.state_dict(rank_0_only=True)
            own = {name: whole for name, value in checkpoint.items() if value is self._placeholder}
            super().save_checkpoint({**checkpoint, **own}, path, storage_options)
            return
        checkpoints.refuse_storage_options(storage_options)
        checkpoints.write(engine, checkpoint, path, self._placeholder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """See Lightning. Collective. Also reads single files written by any strategy of Lightning."""
        path = Path(self.broadcast(str(checkpoint_path)))
        module = self.lightning_module
        is_sharded = checkpoints.is_sharded(path)
        if is_sharded:
            checkpoint = checkpoints.read_meta(path, weights_only=weights_only)
        else:
            checkpoint = super().load_checkpoint(path, weights_only)
        if module is not None and module.trainer.state.fn == "fit":
            add_saved_groups(module.trainer, module, checkpoint)
        if not is_sharded:
            return checkpoint
        assert self.engine is not None
        return checkpoints.read(self.engine, path, checkpoint)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        weights = checkpoint[checkpoints.WEIGHTS]
        if not weights:
            return  # the engine has loaded them
        split_engine = self._split_engine
        if split_engine is not None:
            split_engine.load_state_dict(weights)
        else:
            self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        forget_saved_groups(self.lightning_module.trainer)
        split_engine = self._split_engine
        for optimizer, state in zip(self.optimizers, checkpoint[checkpoints.STATES], strict=True):
            if not state:
                continue  # the engine has loaded it
            if split_engine is not None:
                self._require_one_optimizer()
                split_engine.load_optimizer_state_dict(state)
            else:
                optimizer.load_state_dict(state)

    @property
    def _split_engine(self) -> sw.Engine | None:
        """The engine, if model axes split the module, so that plain state dicts do not fit."""
        engine = self.engine
        return engine if engine is not None and engine.mesh.parted_axes else None

    def _require_one_optimizer(self) -> None:
        if len(self.optimizers) > 1:
            raise ConfigError(
                "Single files have separate states for each optimizer, but a module that is split along model axes "
                "supports whole states only for one optimizer. Leave state_dict_type='full' out, and resume from "
                "folders."
            )

    # -- the end ----------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Make the other ranks raise too, with this exception in their message."""
        if self._own_world is not None and self._own_world.size > 1:
            self._own_world.close(exception)

    def teardown(self) -> None:
        """The module stays sharded, so that its weights can be read and it can be evaluated."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
