"""What an Accelerator over our engine saves and loads, and what ranks do together then."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from accelerate.accelerator import Accelerator
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, StateError
from shardwise.integrations.folders import STATE_FOLDER
from shardwise.integrations.preparing import engine_folder, ids_of
from shardwise.integrations.together import Together


class SavingAccelerator(Accelerator):
    """Accelerate's own, as far as it saves and loads models that have engines."""

    _models: list[Any]
    _optimizers: list[Any]
    _engines: dict[nn.Module, sw.Engine]
    _together: Together
    keeps_engines: bool
    reads_alone: ClassVar[bool] = False
    """Whether the main process may read sharded models alone after `wait_for_everyone`, as unmodified scripts do."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The whole state dict of a prepared model, on the CPU of rank 0; `{}` on the others. All ranks call."""
        engine = self._engines.get(model)
        if engine is None:
            return super().get_state_dict(model, unwrap)
        if self._together.is_saving:
            return self._together.nothing
        self._together.leave()
        return engine.state_dict(rank_0_only=True)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """See accelerate. Models and optimizers go into `shardwise/` below, which any number of ranks can load.

        The main process may call alone; the others join as they come to the next `accumulate`. Hooks get sharded models
        as well, which are whole on each rank while they run.
        """

        def save() -> Any:
            with self._plain_optimizers():
                hook = self.register_save_state_pre_hook(self._together.take_out)
                try:
                    return Accelerator.save_state(self, output_dir, safe_serialization, **kwargs)
                finally:
                    hook.remove()

        return self._together.meet(save, has_hooks=bool(self._save_model_state_pre_hook))

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """See accelerate. Raises `ConfigError` for a folder that was written without an engine."""
        if self._engines and input_dir is not None:
            folder = Path(input_dir).expanduser()
            if folder.is_dir() and not (folder / STATE_FOLDER).is_dir():
                raise ConfigError(
                    f"{folder} was saved without an engine: it has no {STATE_FOLDER}/. Load its weights into the model "
                    f"before prepare(), and its optimizer by optimizer.load_state_dict()."
                )
        self._together.leave()
        with self._plain_optimizers():
            hook = self.register_load_state_pre_hook(self._load_engines)
            try:
                super().load_state(input_dir, load_kwargs, **kwargs)
            finally:
                hook.remove()

    @contextmanager
    def _plain_optimizers(self) -> Iterator[None]:
        """Inside, accelerate knows of optimizers that have no engine only."""
        optimizers = self._optimizers
        sharded = {id(param) for model in self._engines for param in model.parameters()}
        self._optimizers = [one for one in optimizers if not sharded & ids_of(one)]
        try:
            yield
        finally:
            self._optimizers = optimizers

    def _load_engines(self, models: list[nn.Module], folder: str) -> None:
        """The last of the hooks before accelerate reads: it reads the others."""
        models[:] = [model for model in models if model not in self._engines]
        for number, engine in enumerate(self._engines.values()):
            if engine.resume(engine_folder(folder, number)) is None:
                raise StateError(f"{folder} has no checkpoint of model {number}; was it saved with fewer models?")

    # -- ranks apart and together -----------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """See accelerate."""
        if self._together.is_saving or self.keeps_engines:
            super().wait_for_everyone()
            return
        if self.num_processes > 1:
            self._together.meet()
        super().wait_for_everyone()
        if self.reads_alone:
            self._together.allow_reading()

    @property
    def is_main_process(self) -> bool:
        """See accelerate."""
        self._together.read()
        return bool(super().is_main_process)
