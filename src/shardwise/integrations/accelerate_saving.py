"""How an `Accelerator` on our engine saves and loads, and how its ranks coordinate for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from accelerate.accelerator import Accelerator
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, StateError
from shardwise.integrations.accelerate_coordination import Coordination
from shardwise.integrations.checkpoint_folders import STATE_FOLDER
from shardwise.integrations.model_patches import engine_folder, param_ids


class SavingAccelerator(Accelerator):
    """The part of our `Accelerator` that saves and loads sharded models."""

    _models: list[Any]
    _optimizers: list[Any]
    _engines: dict[nn.Module, sw.Engine]
    _coordination: Coordination
    keeps_engines: bool
    main_process_reads_alone: ClassVar[bool] = False
    """Whether the main process may read sharded models alone after `wait_for_everyone`, as unmodified scripts do."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict of a prepared model, on the CPU of rank 0; `{}` on the others. Collective."""
        engine = self._engines.get(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        if self._coordination.is_saving:
            return self._coordination.placeholder
        self._coordination.release()
        return engine.state_dict(rank_0_only=True)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """See accelerate. Models and optimizers go into the subfolder `shardwise/`, which any number of ranks can load.

        The main process may call it alone; the other ranks join at their next `accumulate`. Hooks also get sharded
        models, which are whole on each rank while the hooks run.
        """

        def save() -> Any:
            with self._plain_optimizers():
                hook = self.register_save_state_pre_hook(self._coordination.remove_placeholders)
                try:
                    return Accelerator.save_state(self, output_dir, safe_serialization, **kwargs)
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
        for number, engine in enumerate(self._engines.values()):
            if engine.resume(engine_folder(folder, number)) is None:
                raise StateError(f"{folder} has no checkpoint of model {number}; was it saved with fewer models?")

    # -- synchronization --------------------------------------------------------------------------------

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
