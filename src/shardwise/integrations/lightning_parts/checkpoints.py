"""Checkpoints inside of Lightning's: a folder in the place of its file.

`epoch=0-step=100.ckpt/` has `shardwise/`, of which each rank writes and reads its own part, and `meta.pt` with all that
Lightning keeps besides (loops, callbacks, schedulers, hyper-parameters). That is written last: a folder without it was
cut short. A checkpoint of weights alone is one plain file of Lightning's, which rank 0 writes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.integrations.folders import STATE_FOLDER

META = "meta.pt"
STATES = "optimizer_states"
WEIGHTS = "state_dict"
_ELSEWHERE = "shardwise_elsewhere"
"""In `meta.pt`: under which keys the model's own weights stood, which are in `shardwise/`."""


def is_sharded(path: Path) -> bool:
    """Whether `path` is one of these folders. Raises `CheckpointError` for a folder that is none."""
    if not path.is_dir():
        return False
    if not (path / META).is_file() or not (path / STATE_FOLDER).is_dir():
        raise CheckpointError(
            f"{path} is a folder without {META} and {STATE_FOLDER}/: it was cut short, or another strategy wrote it. "
            f"Take another checkpoint, or one that is a single file."
        )
    return True


def write(engine: sw.Engine, checkpoint: dict[str, Any], path: Path, standing: object) -> None:
    """All ranks call. `standing` is the object that stands for the model's weights in `checkpoint`."""
    world = engine.world
    if world.rank == 0:
        if path.is_file():
            path.unlink()
        path.mkdir(parents=True, exist_ok=True)
        (path / META).unlink(missing_ok=True)
        if (path / STATE_FOLDER).is_dir():
            shutil.rmtree(path / STATE_FOLDER)
    world.barrier()
    engine.save(path / STATE_FOLDER)
    if world.rank == 0:
        elsewhere = [name for name, value in checkpoint.items() if value is standing]
        draft = path / f"{META}.draft"
        torch.save({**checkpoint, _ELSEWHERE: elsewhere}, draft)
        draft.replace(path / META)


def read(engine: sw.Engine, path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """What Lightning kept, with the engine resumed. All ranks call.

    A callback may have kept the model's own weights aside, and others in their place: then they are there, whole.
    """
    checkpoint: dict[str, Any] = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    if engine.resume(path / STATE_FOLDER) is None:
        raise CheckpointError(f"{path / STATE_FOLDER} has no checkpoint; was saving cut short? Take another.")
    elsewhere = checkpoint.pop(_ELSEWHERE)
    for name in elsewhere:
        if name != WEIGHTS:
            checkpoint[name] = engine.state_dict()
    return checkpoint
