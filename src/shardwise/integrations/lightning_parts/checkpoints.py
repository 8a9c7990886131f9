"""Sharded checkpoints of Lightning's Trainer: a folder instead of a file.

`epoch=0-step=100.ckpt/` contains `shardwise/`, of which each rank writes and reads its own part, and `meta.pt` with
everything else that Lightning saves (loops, callbacks, schedulers, hyper-parameters). `meta.pt` is written last, so a
folder without it is incomplete. A checkpoint with only weights is a plain Lightning file, which rank 0 writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.comm.agreed import agreed
from shardwise.errors import CheckpointError, ConfigError
from shardwise.integrations.checkpoint_folders import STATE_FOLDER
from shardwise.system.safe_files import replaced

META = "meta.pt"
STATES = "optimizer_states"
WEIGHTS = "state_dict"
_SHARDED_KEYS = "shardwise_elsewhere"
"""The entry of `meta.pt` with the keys of the model's weights, which are in `shardwise/` instead."""


def is_sharded(path: Path) -> bool:
    """Whether `path` is such a folder. Raises `CheckpointError` for any other folder."""
    if not path.is_dir():
        return False
    if not (path / META).is_file() or not (path / STATE_FOLDER).is_dir():
        raise CheckpointError(
            f"{path} is a folder without {META} and {STATE_FOLDER}/: saving was interrupted, or another strategy wrote "
            f"it. Use another checkpoint, or one that is a single file."
        )
    return True


def refuse_storage_options(options: object) -> None:
    """Raise `ConfigError` for options of a file system, which folders do not have."""
    if options is not None:
        raise ConfigError(
            "storage_options is only for checkpoints that are single files. Leave it out, or pass "
            "state_dict_type='full' to the strategy."
        )


@contextmanager
def written(path: Path, world: sw.World, meta: Mapping[str, Any]) -> Iterator[None]:
    """Make `path` a folder for the engines' checkpoints, which are written inside; then write `meta` there. What was at
    `path` is removed. Collective."""
    with agreed(world, "checkpoint", CheckpointError):
        if world.rank == 0:
            if path.is_file():
                path.unlink()
            path.mkdir(parents=True, exist_ok=True)
            (path / META).unlink(missing_ok=True)
            for folder in path.glob(f"{STATE_FOLDER}*"):
                shutil.rmtree(folder)
    yield
    with agreed(world, "checkpoint", CheckpointError):
        if world.rank == 0:
            with replaced(path / META) as draft:
                torch.save(dict(meta), draft)


def write(engine: sw.Engine, checkpoint: dict[str, Any], path: Path, placeholder: object) -> None:
    """Write a checkpoint. Collective. `placeholder` is the object that replaces the model's weights in `checkpoint`."""
    sharded = [name for name, value in checkpoint.items() if value is placeholder]
    with written(path, engine.world, {**checkpoint, _SHARDED_KEYS: sharded}):
        engine.save(path / STATE_FOLDER)


def read_meta(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's part of the checkpoint, for `read`."""
    checkpoint: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    return checkpoint


def read(engine: sw.Engine, path: Path, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Resume the engine, and return Lightning's part of the checkpoint, completed. Collective.

    If a callback had saved the model's weights under another key, for example because it saves averaged weights in
    their place, they are returned whole under that key.
    """
    if engine.resume(path / STATE_FOLDER) is None:
        raise CheckpointError(
            f"{path / STATE_FOLDER} has no complete checkpoint; saving may have been interrupted. Resume from another "
            f"one."
        )
    for name in checkpoint.pop(_SHARDED_KEYS):
        if name != WEIGHTS:
            checkpoint[name] = engine.state_dict()
    return checkpoint
