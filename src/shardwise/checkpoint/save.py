"""Writing a checkpoint: everybody writes beside the target, then it appears under its name at once."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shardwise.checkpoint import rng
from shardwise.checkpoint.content import Content
from shardwise.checkpoint.index import INDEX, LATEST, Chunk, File, Index
from shardwise.comm import World
from shardwise.errors import CheckpointError
from shardwise.version import __version__


def save(folder: Path, step: int, content: Content, world: World, *, state: dict[str, Any], layout: str) -> Path:
    """Write `folder/step-XXXXXXXX`, then point `folder/latest` at it. All ranks call.

    A reader, or a `kill -9`, never sees half a checkpoint. If one rank fails, all raise `CheckpointError`,
    and what was there before is still there.
    """
    target = folder / f"step-{step:08d}"
    draft = folder / f".writing-step-{step:08d}"
    report = _attempt(world, lambda: _begin(draft) if world.rank == 0 else None, draft)
    report = _attempt(world, lambda: _write_rank(draft, content, world.rank), draft)
    if world.rank == 0:
        index = _index(report, step, content, world, state, layout)
    _attempt(world, lambda: _publish(draft, target, index.to_json()) if world.rank == 0 else None, draft)
    return target


def _attempt(world: World, work: Any, draft: Path) -> list[dict[str, Any]]:
    """Do `work` on every rank and learn how all of them fared; if one failed, all clean up and raise."""
    try:
        outcome = {"result": work()}
    except (OSError, ValueError, TypeError) as error:
        outcome = {"error": f"{type(error).__name__}: {error}"}
    outcomes = [json.loads(message) for message in world.exchange(json.dumps(outcome).encode())]
    failed = [(rank, said["error"]) for rank, said in enumerate(outcomes) if "error" in said]
    if failed:
        if world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
        rank, what = failed[0]
        raise CheckpointError(
            f"The checkpoint could not be written: rank {rank} met {what}. Earlier checkpoints in "
            f"{draft.parent} are untouched."
        )
    return [said["result"] for said in outcomes]


def _begin(draft: Path) -> None:
    """A fresh folder for the draft; one that a killed job left behind goes."""
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def _write_rank(draft: Path, content: Content, rank: int) -> dict[str, Any]:
    """This rank's own file, flushed to disk. Returns what the index must know of it."""
    name = f"rank-{rank:05d}.safetensors"
    owned = [entry for entry in content.entries if entry.is_owner and (entry.span.numel or entry.tensor.dim() == 0)]
    tensors = {entry.key: entry.tensor.detach().cpu().contiguous().clone() for entry in owned}
    path = draft / name
    save_file(tensors, path)
    _flush(path)
    chunks = [Chunk(entry.kind, entry.name, entry.span.start, entry.span.stop, name, entry.key) for entry in owned]
    file = File(name, path.stat().st_size, checksum(path))
    return {"file": asdict(file), "chunks": [asdict(chunk) for chunk in chunks], "rng": rng.capture()}


def _index(
    reports: list[dict[str, Any]],
    step: int,
    content: Content,
    world: World,
    state: dict[str, Any],
    layout: str,
) -> Index:
    return Index(
        step=step,
        world_size=world.size,
        layout=layout,
        state=state,
        shapes={name: list(shape) for name, shape in content.shapes.items()},
        groups=content.groups,
        ties=content.ties,
        versions={"shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()},
        files=[File(**report["file"]) for report in reports],
        chunks=[Chunk(**chunk) for report in reports for chunk in report["chunks"]],
        rng=[report["rng"] for report in reports],
    )


def _publish(draft: Path, target: Path, index_json: str) -> None:
    """From here on the checkpoint exists. A folder is renamed in one step; the index is in it already."""
    (draft / INDEX).write_text(index_json)
    _flush(draft / INDEX)
    _flush(draft)
    old = target.with_name(f".replaced-{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    draft.rename(target)
    pointer = target.parent / f".{LATEST}"
    pointer.write_text(target.name)
    pointer.replace(target.parent / LATEST)
    _flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def _flush(path: Path) -> None:
    """To the disk itself, so that a power cut cannot leave a name without its bytes."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot flush a folder, and need not
            os.fsync(handle)
    finally:
        os.close(handle)
