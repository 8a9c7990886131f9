"""Replaces Trainer and Accelerator of an unmodified script by ours, when their modules are imported.

[Note: when a class is replaced] An import hook at the front of `sys.meta_path` sees the import of
`accelerate.accelerator`, `transformers.trainer`, and Lightning's `trainer.trainer` and `fabric.fabric`. It replaces the
class by a subclass right after the module has been executed, before other code can reference it. So `from transformers
import Trainer`, `Seq2SeqTrainer`, trainers of TRL, and classes that the script derives from any of them, all inherit
from ours. They must not derive from `ShardwiseTrainerMixin` a second time.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import shardwise as sw
from shardwise.errors import StateError

ACCELERATE, TRANSFORMERS = "accelerate.accelerator", "transformers.trainer"
ARGUMENTS, MODELS = "transformers.training_args", "transformers.modeling_utils"
LIGHTNINGS = {
    "lightning.pytorch.trainer.trainer": ("Trainer", "shardwise.integrations.lightning"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "shardwise.integrations.pytorch_lightning"),
    "lightning.fabric.fabric": ("Fabric", "shardwise.integrations.fabric"),
    "lightning_fabric.fabric": ("Fabric", "shardwise.integrations.lightning_fabric"),
}
"""By module of Lightning, which has two packages and two doors: its class, and where the strategy for that is."""


class Takeover(importlib.abc.MetaPathFinder):
    """Once installed, sets `plan` as the default for every Trainer and Accelerator of this process."""

    def __init__(self, plan: str | Path | dict[str, Any], *, as_deepspeed: bool = False) -> None:
        """`as_deepspeed`: a DeepSpeed config that the script or `accelerate launch` sets overrides `plan`.

        Raises `ConfigError` for an invalid plan, before the script runs.
        """
        self.plan = sw.load_plan(plan)
        self._is_deepspeed = as_deepspeed
        self._changes: dict[str, Callable[[Any], None]] = {
            ACCELERATE: self._patch_accelerate,
            TRANSFORMERS: self._patch_transformers,
            **{name: partial(self._patch_lightning, *replaced) for name, replaced in LIGHTNINGS.items()},
        }
        if as_deepspeed:
            self._changes |= {ARGUMENTS: _patch_arguments, MODELS: _patch_models}

    def install(self) -> None:
        """Install the import hook. Raises `StateError` if one of the modules has been imported already."""
        for name in self._changes:
            if name in sys.modules:
                raise StateError(f"{name} was imported before shardwise could replace its class. Import it later.")
        sys.meta_path.insert(0, self)

    @property
    def is_used(self) -> bool:
        """Whether any Trainer or Accelerator has been created."""
        accelerate = sys.modules.get("shardwise.integrations.accelerate")
        lightning = sys.modules.get("shardwise.integrations.lightning_parts")
        return (accelerate is not None and accelerate.Accelerator.num_made > 0) or (
            lightning is not None and lightning.StrategyMixin.num_made > 0
        )

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = self._changes.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterImport(spec.loader, change)
        return spec

    def _patch_accelerate(self, module: Any) -> None:
        import torch

        from shardwise.integrations.accelerate import Accelerator

        if not torch.accelerator.is_available():
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else each process would see a world of size 1
        Accelerator.default_plan = self.plan
        Accelerator.main_process_reads_alone = True
        if self._is_deepspeed:
            from shardwise.integrations.accelerate_deepspeed import DeepSpeedAccelerator

            module.Accelerator = DeepSpeedAccelerator
        else:
            module.Accelerator = Accelerator

    def _patch_transformers(self, module: Any) -> None:
        from shardwise.integrations.transformers import ShardwiseTrainerMixin, Trainer

        ShardwiseTrainerMixin.default_plan = self.plan
        module.Trainer = Trainer

    def _patch_lightning(self, name: str, strategies: str, module: Any) -> None:
        """Replace Lightning's class `name` by one that takes our strategy in the place of others."""
        from shardwise.integrations.lightning_parts import trainer_over

        strategy = importlib.import_module(strategies).ShardwiseStrategy
        strategy.default_plan = self.plan
        setattr(module, name, trainer_over(getattr(module, name), strategy))


def _patch_arguments(module: Any) -> None:
    from shardwise.integrations.hf_deepspeed import take_over_arguments

    take_over_arguments(module.TrainingArguments)


def _patch_models(module: Any) -> None:
    from shardwise.integrations.hf_zero3 import take_over_models

    take_over_models(module)


class _AfterImport(importlib.abc.Loader):
    """Wraps a loader, and calls `change` after it has executed the module."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
