"""`preset: auto` under Lightning's Trainer: the plan for a batch of the training loader, as `training_step` gets it.

[Note: a step in a rehearsal] Trainer calls the module's steps, not its forward. So while a plan is chosen, `forward` of
the module is its `training_step`; within that it is its own again. Copies of the module that are rehearsed have no
Trainer: what they log goes nowhere.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import MethodType
from typing import Any

from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.integrations.plans import without
from shardwise.integrations.sample_batch import NoBatchError, collated_batch, cure, same_random_numbers
from shardwise.system.torch_private import tree_leaves, tree_map_only

DOOR = "ShardwiseStrategy"
_OWN = "_shardwise_own_forward"
"""The attribute of a module with a `forward` of its own, instead of its class's, while that is replaced."""


def chosen_plan(strategy: Any, trainer: Any, plan: sw.Plan, batch: object) -> sw.Plan:
    """`plan` with what its preset `auto` stands for, for the module, optimizers and training loader of `trainer`. With
    `batch` it is what the module's own forward is called with. Collective; raises `ConfigError` and `ModelError` as
    `sw.choose_plan` does."""
    module = strategy.lightning_module
    choose = partial(
        sw.choose_plan,
        module,
        sw.load_plan(plan, [f"accumulate={trainer.accumulate_grad_batches}"]),
        optimizer=strategy.optimizers,
        world=strategy.world,
        device=None if strategy.root_device.type == "cpu" else strategy.root_device,
        as_call=True,
    )
    if batch is not None:
        return without(choose(batch=batch), "accumulate")
    if not module.automatic_optimization:
        raise ConfigError(
            f"preset: auto rehearses training_step, but with manual optimization that runs whole steps. {cure(DOOR)}"
        )
    batch = _training_batch(strategy, trainer)
    with _steps_as_forward(module, strategy.precision_plugin.forward_context), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*self\.log\(\)` but the `self\.trainer` reference is not registered")
        try:
            return without(choose(batch=batch), "accumulate")
        except ModelError as error:
            raise ModelError(
                f"{error} It is training_step that is rehearsed, without a Trainer. {cure(DOOR)}"
            ) from error


def _training_batch(strategy: Any, trainer: Any) -> object:
    """The arguments of `training_step`. The loader is asked for once more, and again when training begins."""
    try:
        with same_random_numbers():
            given = trainer.fit_loop._data_source.dataloader()
            batch = strategy.batch_to_device(_collated(given))
    except NoBatchError as error:
        raise ConfigError(f"{error} {cure(DOOR)}") from error
    return (batch, 0) if len(inspect.signature(strategy.lightning_module.training_step).parameters) > 1 else (batch,)


def _collated(given: Any) -> Any:
    """A batch of one loader, or of each in a dict, a list or a `CombinedLoader`. Raises `NoBatchError`."""
    if getattr(given, "_mode", None) == "sequential":
        raise NoBatchError("preset: auto needs a batch, but several loaders are read one after the other.")
    loaders = getattr(given, "iterables", given)
    other = next((one for one in tree_leaves(loaders) if not isinstance(one, DataLoader)), None)
    if other is not None:
        raise NoBatchError(
            f"preset: auto needs a batch of a DataLoader, but the training data are {type(other).__name__}."
        )
    return tree_map_only(DataLoader, collated_batch, loaders)


@contextmanager
def _steps_as_forward(module: Any, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """See [Note: a step in a rehearsal]. Each step runs inside a context that `around` makes."""

    def forward(self: Any, *args: Any) -> Any:
        replaced = self.__dict__.pop("forward")
        if _OWN in self.__dict__:
            self.__dict__["forward"] = self.__dict__[_OWN]
        try:
            with around():
                return self.training_step(*args)
        finally:
            self.__dict__["forward"] = replaced

    if "forward" in module.__dict__:
        module.__dict__[_OWN] = module.__dict__["forward"]
    module.__dict__["forward"] = MethodType(forward, module)  # copies of the module get one of their own
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if _OWN in module.__dict__:
            module.__dict__["forward"] = module.__dict__.pop(_OWN)
