"""How the Lightning strategy saves and loads: sharded folders, or single files like those of Lightning's DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.lightning_parts import checkpoints
from shardwise.integrations.lightning_parts.finetuning import add_saved_groups, forget_saved_groups

_Base: Any = object
ENGINE = "_shardwise_engine"
"""The attribute of a LightningModule with its engine, which may outlive the Trainer that created it."""


class StateMixin(_Base):
    """Part of `StrategyMixin`."""

    _state_dict_type: str
    _placeholder: dict[str, Any]

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
        if storage_options is not None:
            raise ConfigError(
                "storage_options is only for checkpoints that are single files. Leave it out, or pass "
                "state_dict_type='full' to the strategy."
            )
        checkpoints.write(engine, checkpoint, path, self._placeholder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """See Lightning. Collective. Also reads single files written by any strategy of Lightning."""
        path = Path(self.broadcast(str(checkpoint_path)))
        module = self.lightning_module
        is_fit = module is not None and module.trainer.state.fn == "fit"
        if not checkpoints.is_sharded(path):
            checkpoint = super().load_checkpoint(path, weights_only)
            if is_fit:
                add_saved_groups(module.trainer, module, checkpoint)
            return checkpoint
        assert self.engine is not None
        checkpoint = checkpoints.read_meta(path, weights_only=weights_only)
        if is_fit:
            add_saved_groups(module.trainer, module, checkpoint)
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
