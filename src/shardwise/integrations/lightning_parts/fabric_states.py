"""What `fabric.save` writes with an engine: a folder, with `shardwise/` for a model and `meta.pt` for the rest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.folders import STATE_FOLDER
from shardwise.integrations.lightning_parts.checkpoints import META, is_sharded
from shardwise.integrations.preparing import engine_folder, ids_of

__all__ = ["is_sharded", "is_stateful", "load", "owner_of", "save", "with_whole_states"]

Engines = Mapping[nn.Module, sw.Engine]
_MODELS = "shardwise_models"
"""In `meta.pt`: names of the models whose weights and optimizer states are in `shardwise/`, in their order."""


def owner_of(optimizer: torch.optim.Optimizer, engines: Engines) -> sw.Engine | None:
    """The engine that updates what `optimizer` has."""
    mine = ids_of(optimizer)
    return next((engine for model, engine in engines.items() if mine & {id(one) for one in model.parameters()}), None)


def is_stateful(one: object) -> bool:
    return hasattr(one, "state_dict") and hasattr(one, "load_state_dict")


def save(path: Path, state: Mapping[str, Any], engines: Engines, world: sw.World) -> None:
    """All ranks call. `meta.pt` is written last: a folder without it was cut short."""
    models = [name for name, one in state.items() if isinstance(one, nn.Module) and one in engines]
    saved = {engines[state[name]] for name in models}
    for name, one in state.items():
        owner = owner_of(one, engines) if isinstance(one, torch.optim.Optimizer) else None
        if owner is not None and owner not in saved:
            raise ConfigError(f"The state has the optimizer {name!r} without its model. Put the model into it too.")
    rest = {name: one for name, one in state.items() if not _is_elsewhere(one, engines)}
    converted = {name: one.state_dict() if is_stateful(one) else one for name, one in rest.items()}
    if world.rank == 0:
        if path.is_file():
            path.unlink()
        path.mkdir(parents=True, exist_ok=True)
        (path / META).unlink(missing_ok=True)
        for folder in path.glob(f"{STATE_FOLDER}*"):
            shutil.rmtree(folder)
    world.barrier()
    for number, name in enumerate(models):
        engines[state[name]].save(engine_folder(str(path), number))
    if world.rank == 0:
        draft = path / f"{META}.draft"
        torch.save({**converted, _MODELS: models}, draft)
        draft.replace(path / META)
    world.barrier()


def load(path: Path, state: Any, engines: Engines, *, strict: bool, weights_only: bool | None) -> dict[str, Any]:
    """Go on from a folder; returns what `state` has no place for. All ranks call, with models that are set up."""
    kept: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    models = kept.pop(_MODELS, None)
    if models is None:
        raise CheckpointError(f"{path} was written by Lightning's Trainer. Give it to trainer.fit(ckpt_path=...).")
    if not isinstance(state, dict) or any(state.get(name) not in engines for name in models):
        raise ConfigError(
            f"{path} has the models {', '.join(map(repr, models))} in shards. Give fabric.load a state with each of "
            f"them under its name, after fabric.setup(model, optimizer)."
        )
    wanted = [name for name, one in state.items() if not _is_elsewhere(one, engines)]
    missing = [name for name in wanted if name not in kept]
    missing += [name for name, one in state.items() if _is_sharded_model(one, engines) and name not in models]
    if missing and strict:
        raise KeyError(f"{path} has no {missing[0]!r}. Leave it out of the state, or give fabric.load strict=False.")
    for number, name in enumerate(models):
        if engines[state[name]].resume(engine_folder(str(path), number)) is None:
            raise CheckpointError(f"{path} has no checkpoint of {name!r}; was saving cut short? Take another.")
    for name in wanted:
        if name not in kept:
            continue
        if is_stateful(state[name]):
            state[name].load_state_dict(kept.pop(name))
        else:
            state[name] = kept.pop(name)
    return kept


def with_whole_states(state: Mapping[str, Any], engines: Engines) -> dict[str, Any]:
    """`state`, in which optimizers of models that are cut over ranks take whole states."""
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


def _is_elsewhere(one: object, engines: Engines) -> bool:
    """Whether an engine's checkpoint has it."""
    if isinstance(one, torch.optim.Optimizer):
        return owner_of(one, engines) is not None
    return _is_sharded_model(one, engines)
