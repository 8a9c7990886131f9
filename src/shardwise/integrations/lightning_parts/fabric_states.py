"""Sharded checkpoints of `fabric.save`: a folder with `shardwise/` for each model and `meta.pt` for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.lightning_parts.checkpoints import META, is_sharded, written
from shardwise.integrations.model_patches import engine_folder, param_ids

__all__ = ["is_sharded", "is_stateful", "load", "owner_of", "save", "with_whole_states"]

Engines = Mapping[nn.Module, sw.Engine]
_MODELS = "shardwise_models"
"""The entry of `meta.pt` with the names of the models whose weights and optimizer states are in `shardwise/`, in
order."""


def owner_of(optimizer: torch.optim.Optimizer, engines: Engines) -> sw.Engine | None:
    """The engine that updates the parameters of `optimizer`."""
    ids = param_ids(optimizer)
    return next((engine for model, engine in engines.items() if ids & {id(one) for one in model.parameters()}), None)


def is_stateful(one: object) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def save(path: Path, state: Mapping[str, Any], engines: Engines, world: sw.World) -> None:
    """Write a checkpoint. Collective. `meta.pt` is written last, so a folder without it is incomplete."""
    models = [name for name, one in state.items() if isinstance(one, nn.Module) and one in engines]
    saved = {engines[state[name]] for name in models}
    for name, one in state.items():
        owner = owner_of(one, engines) if isinstance(one, torch.optim.Optimizer) else None
        if owner is not None and owner not in saved:
            raise ConfigError(f"The state has the optimizer {name!r} without its model. Add the model to the state.")
    rest = {name: one for name, one in state.items() if not _is_in_engine(one, engines)}
    converted = {name: one.state_dict() if is_stateful(one) else one for name, one in rest.items()}
    with written(path, world, {**converted, _MODELS: models}):
        for number, name in enumerate(models):
            engines[state[name]].save(engine_folder(str(path), number))


def load(path: Path, state: Any, engines: Engines, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Load a checkpoint into `state`; returns the entries that `state` does not have. Collective, after models are set
    up."""
    kept: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    models = kept.pop(_MODELS, None)
    if models is None:
        raise CheckpointError(f"{path} was written by Lightning's Trainer. Load it with trainer.fit(ckpt_path=...).")
    if not isinstance(state, dict) or any(state.get(name) not in engines for name in models):
        raise ConfigError(
            f"{path} has the sharded models {', '.join(map(repr, models))}. Pass fabric.load a state with each of them "
            f"under its name, after fabric.setup(model, optimizer)."
        )
    wanted = [name for name, one in state.items() if not _is_in_engine(one, engines)]
    missing = [name for name in wanted if name not in kept]
    missing += [name for name, one in state.items() if _is_sharded_model(one, engines) and name not in models]
    if missing and strict:
        raise KeyError(f"{path} has no {missing[0]!r}. Leave it out of the state, or pass strict=False to fabric.load.")
    for number, name in enumerate(models):
        if engines[state[name]].resume(engine_folder(str(path), number)) is None:
            raise CheckpointError(
                f"{path} has no complete checkpoint of {name!r}; saving may have been interrupted. Load another one."
            )
    for name in wanted:
        if name not in kept:
            continue
        if is_stateful(state[name]):
            state[name].load_state_dict(kept.pop(name))
        else:
            state[name] = kept.pop(name)
    return kept


def with_whole_states(state: Mapping[str, Any], engines: Engines) -> dict[str, Any]:
    """`state`, with optimizers of models that are split along model axes replaced by objects that load whole states."""
    loads = dict(state)
    for name, one in state.items():
        engine = owner_of(one, engines) if isinstance(one, torch.optim.Optimizer) else None
        if engine is not None and engine.mesh.parted_axes:
            loads[name] = _WholeStates(engine)
    return loads


class _WholeStates:
    def __init__(self, engine: sw.Engine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return self._engine.optimizer_state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._engine.load_optimizer_state_dict(state)


def _is_sharded_model(one: object, engines: Engines) -> bool:
    return isinstance(one, nn.Module) and one in engines


def _is_in_engine(one: object, engines: Engines) -> bool:
    """Whether an object is part of an engine's checkpoint."""
    if isinstance(one, torch.optim.Optimizer):
        return owner_of(one, engines) is not None
    return _is_sharded_model(one, engines)
