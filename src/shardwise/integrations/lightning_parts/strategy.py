"""The strategy: where Lightning asks for a model, a backward, a checkpoint, the engine answers.

Ranks, devices, launching and the messages of `self.log(..., sync_dist=True)` are those of Lightning's DDPStrategy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.lightning_parts.precision import refuse_scaler, with_engine
from shardwise.integrations.lightning_parts.settings import places, plan_for, refuse_settings
from shardwise.integrations.lightning_parts.states import ENGINE, StateMixin
from shardwise.integrations.lightning_parts.uneven import Pace
from shardwise.integrations.plans import PlanLike, require_no_stages, share_of_data
from shardwise.integrations.preparing import ids_of, zero_apart, zero_together


def _call(optimizer: torch.optim.Optimizer, name: str, *args: Any, **kwargs: Any) -> Any:
    """A method that is looked up now: the engine replaces them, and again where it plans again."""
    return getattr(optimizer, name)(*args, **kwargs)


class StrategyMixin(StateMixin):
    """In front of Lightning's DDPStrategy: the LightningModule is sharded by `plan`, and stays the same object.

    `plan` is a preset's name, a file, a dict or a `sw.Plan`; without one `zero3`. With `state_dict_type="sharded"`
    checkpoints are folders, into which each rank writes its part and which any number of ranks can load; with
    `"full"` they are single files as of DDP, whole in the memory of rank 0. Other arguments are DDPStrategy's for
    devices and launching.

    The module is sharded when `fit`, `validate`, `test` or `predict` begins, and stays so afterwards: `state_dict()`,
    `trainer.save_checkpoint` and the next of these work on all ranks together. `release()` makes it plain again.

    Ranks along the axes `tp` and `sp` of the plan's mesh are given the same batches. Raises `ConfigError` for a plan
    with stages of a pipeline, and for what belongs to another engine.
    """

    strategy_name = "shardwise"
    default_plan: ClassVar[PlanLike] = "zero3"
    """What counts where `plan` is not given."""
    num_made: ClassVar[int] = 0
    """How many there have been in this process."""

    def __init__(
        self,
        plan: PlanLike | None = None,
        *,
        state_dict_type: Literal["sharded", "full"] = "sharded",
        **settings: Any,
    ) -> None:
        self.plan = sw.load_plan(self.default_plan if plan is None else plan)
        require_no_stages(self.plan, "Lightning")
        refuse_settings(settings)
        if state_dict_type not in ("sharded", "full"):
            raise ConfigError(f"state_dict_type is {state_dict_type!r}. Take 'sharded' or 'full'.")
        super().__init__(**settings)
        StrategyMixin.num_made += 1
        self._state_dict_type = state_dict_type
        self._standing: dict[str, Any] = {}
        self._own_world: sw.World | None = None
        self._pace = Pace()

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

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """See Lightning. Ranks that share in a batch are given the same one."""
        place, count = share_of_data(self.plan, self.global_rank, self.world_size)
        return {"num_replicas": count, "rank": place}

    # -- the engine -------------------------------------------------------------------------------------

    @property
    def world(self) -> sw.World:
        """The ranks, met when this is first asked for."""
        if self._own_world is None:
            self._own_world = sw.World.join(environment=places(self))
        return self._own_world

    def setup(self, trainer: Any) -> None:
        """See Lightning. All ranks call; shards the module, with the optimizers that `fit` has for it."""
        self.accelerator.setup(trainer)
        if self._layer_sync is not None:
            raise ConfigError(
                "sync_batchnorm makes every batch norm a message between ranks of torch's own, which an engine that "
                "recomputes and gathers ahead does not expect. Leave it out: norms are per rank, as under DDP."
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
            self._shard(module, plan)
        engine = self.engine
        assert engine is not None
        self.model = module
        self.precision_plugin.attach(engine, self.optimizers)
        self.setup_precision_plugin()
        self._shorten()

    def _shard(self, module: nn.Module, plan: sw.Plan) -> None:
        own = {id(param) for param in module.parameters()}
        mine = [one for one in self.optimizers if own & ids_of(one)]  # Lightning has one of its own in place of none
        device = None if self.root_device.type == "cpu" else self.root_device
        engine = sw.shard(module, plan, optimizer=mine or None, world=self.world, device=device)
        weakref.finalize(engine, self.world.close)  # before the interpreter ends, too
        module.__dict__[ENGINE] = engine
        zero_together(module, engine)

    def _shorten(self) -> None:
        """Lightning shows an optimizer in a class of its own, by which its methods would go through one parameter after
        the other."""
        for shown in self._lightning_optimizers:
            for name in ("zero_grad", "state_dict", "load_state_dict", "add_param_group"):
                shown.__dict__[name] = partial(_call, shown.optimizer, name)

    def release(self) -> None:
        """Make the module plain again: whole parameters on every rank, no engine. All ranks call.

        Without an engine it does nothing. Raises `ConfigError` for a module that is cut over ranks.
        """
        engine, module = self.engine, self.lightning_module
        if engine is None:
            return
        if engine.mesh.parted_axes:
            raise ConfigError(
                f"The module is cut along {' and '.join(engine.mesh.parted_axes)}, and stays so. For another fit() or "
                f"a plain module make a new one, and give it a checkpoint, or strategy.engine.state_dict()."
            )
        whole = engine.state_dict()
        del module.__dict__[ENGINE]
        zero_apart(module)
        engine.close()
        module.load_state_dict(whole)

    def model_to_device(self) -> None:
        """The engine does it, part by part."""

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Around `configure_model`: what is built there is recorded, and made where the plan has it."""
        return sw.deferred_init()

    # -- steps ------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._called("training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluated("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluated("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluated("predict_step", args, kwargs)

    def _called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A step as a forward of the module, so that whoever hangs on that sees one."""
        module = self.lightning_module
        step = getattr(module, name)
        if name == "training_step" and not module.automatic_optimization:
            return step(*args, **kwargs)  # it has whole steps inside, and forwards of its own
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
        """See Lightning. Gradients that the plan keeps in shards are reduced all the same; there is no other place."""
        engine = self.engine
        if engine is None or engine.table.grad.shard:
            yield
            return
        with engine.no_sync():
            yield

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing is wrapped."""

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Nothing is wrapped."""

    # -- evaluation -------------------------------------------------------------------------------------

    def _evaluated(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self.engine is not None
        self._pace.enter(self.engine)
        output = self._called(name, args, kwargs)
        if self._loop().batch_progress.is_last_batch:
            self._pace.leave()
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
        self._pace.begin(self.engine, self.lightning_module.trainer, stage)

    def _end(self) -> None:
        assert self.engine is not None
        self._pace.begin_late(self.engine)

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

    # -- the end ----------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """The other ranks raise too, and name it."""
        if self._own_world is not None and self._own_world.size > 1:
            self._own_world.close(exception)

    def teardown(self) -> None:
        """The module stays sharded, for whoever asks for its weights, or evaluates it."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
