"""What a strategy of Lightning saves and loads: folders of the engine's, or single files as of Lightning's DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.lightning_parts import checkpoints

_Base: Any = object
ENGINE = "_shardwise_engine"
"""Where a LightningModule keeps its engine, which may outlive the Trainer that made it."""


class StateMixin(_Base):
    """Part of `StrategyMixin`."""

    _state_dict_type: str
    _standing: dict[str, Any]

    @property
    def engine(self) -> sw.Engine | None:
        """The engine of the LightningModule, once it is sharded."""
        module = self.lightning_module
        engine: sw.Engine | None = None if module is None else module.__dict__.get(ENGINE)
        return engine

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> Any:
        """The whole state dict on rank 0 if checkpoints are `"full"`; else nothing: `save_checkpoint` sees to it."""
        if self.engine is None:
            return super().lightning_module_state_dict()
        return self.engine.state_dict(rank_0_only=True) if self._state_dict_type == "full" else self._standing

    def optimizer_state(self, optimizer: Any) -> Any:
        """Likewise. All ranks call."""
        if self.engine is not None and self._state_dict_type == "sharded":
            return {}
        cut = self._cut_engine
        if cut is not None:
            self._require_one_optimizer()
            return cut.optimizer_state_dict(rank_0_only=True)
        return getattr(optimizer, "optimizer", optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """See Lightning. All ranks call."""
        engine = self.engine
        if engine is None or self._state_dict_type == "full":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(str(filepath)))
        if checkpoints.STATES not in checkpoint:  # weights alone
            whole = engine.state_dict(rank_0_only=True)
            own = {name: whole for name, value in checkpoint.items() if value is self._standing}
            super().save_checkpoint({**checkpoint, **own}, path, storage_options)
            return
        if storage_options is not None:
            raise ConfigError(
                "storage_options is for checkpoints that are single files. Leave it out, or give the strategy "
                "state_dict_type='full'."
            )
        checkpoints.write(engine, checkpoint, path, self._standing)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """See Lightning. All ranks call. Also reads single files, whichever strategy of Lightning wrote them."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if not checkpoints.is_sharded(path):
            return super().load_checkpoint(path, weights_only)
        assert self.engine is not None
        return checkpoints.read(self.engine, path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        weights = checkpoint[checkpoints.WEIGHTS]
        if not weights:
            return  # the engine has read them
        cut = self._cut_engine
        if cut is not None:
            cut.load_state_dict(weights)
        else:
            self.lightning_module.load_state_dict(weights, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        cut = self._cut_engine
        for optimizer, state in zip(self.optimizers, checkpoint[checkpoints.STATES], strict=True):
            if not state:
                continue  # the engine has read it
            if cut is not None:
                self._require_one_optimizer()
                cut.load_optimizer_state_dict(state)
            else:
                optimizer.load_state_dict(state)

    @property
    def _cut_engine(self) -> sw.Engine | None:
        """The engine, if ranks have parts of the module, which plain state dicts do not fit."""
        engine = self.engine
        return engine if engine is not None and engine.mesh.parted_axes else None

    def _require_one_optimizer(self) -> None:
        if len(self.optimizers) > 1:
            raise ConfigError(
                "Single files have the states of each optimizer by itself, and a module that is cut over ranks has "
                "them whole for one optimizer only. Leave state_dict_type='full' out, and resume from folders."
            )
