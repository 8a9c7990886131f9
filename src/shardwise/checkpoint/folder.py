"""A folder of checkpoints: where a draft is made, how it appears, what is found, what goes.

step-00000100/                 a checkpoint: one file per rank, and the index
latest                         the name of the one to resume from
.writing-step-00000200-...     a draft; nobody reads it
.replaced-step-00000100        what was there while the same step was written anew
.lock                          who writes here
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from shardwise.checkpoint.index import INDEX, read_index
from shardwise.checkpoint.keep import Keep
from shardwise.checkpoint.write import flush, note_path, write_text
from shardwise.errors import CheckpointError
from shardwise.units import format_bytes

LATEST = "latest"
STEP, WRITING, REPLACED, REMOVED = "step-", ".writing-", ".replaced-", ".removed-"
SPARE_BYTES = 2**20
"""For what is written besides the tensors' bytes: notes and the index."""


def step_name(step: int) -> str:
    return f"{STEP}{step:08d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Every checkpoint of the folder, by step. One whose replacement was cut short counts under its own step."""
    found: dict[int, Path] = {}
    for prefix in (REPLACED + STEP, STEP):
        for path in folder.glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix)
            if number.isdigit() and (path / INDEX).exists():
                found[int(number)] = path
    return dict(sorted(found.items()))


def newest(folder: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` points at, else the highest step; `None` if there is none.

    A checkpoint itself may be given too, or the file `latest`.
    """
    if folder.name == LATEST and folder.is_file():
        folder = folder.parent
    if (folder / INDEX).exists():
        return folder
    with contextlib.suppress(OSError, UnicodeDecodeError):
        pointed = folder / (folder / LATEST).read_text().strip()
        if (pointed / INDEX).exists():
            return pointed
    found = list(checkpoints_in(folder).values())
    return found[-1] if found else None


def tidy(folder: Path) -> None:
    """Clear away what a job that was killed has left. Only for whoever has the lock."""
    for path in folder.glob(f"{REPLACED}{STEP}*"):
        target = path.with_name(path.name.removeprefix(REPLACED))
        if not target.exists():
            path.rename(target)
    for prefix in (WRITING, REPLACED, REMOVED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def check_room(folder: Path, num_bytes: int, free_bytes: int) -> None:
    """Raise `CheckpointError` unless that much fits with what is written besides it."""
    if num_bytes + SPARE_BYTES > free_bytes:
        raise CheckpointError(
            f"A checkpoint in {folder} takes {format_bytes(num_bytes + SPARE_BYTES)}, but its file system has "
            f"{format_bytes(free_bytes)} free. Make room, or keep fewer with Keep(last=...)."
        )


def read_note(draft: Path, name: str) -> dict[str, Any] | None:
    """What a rank says of its file once it is done with it; `None` as long as it is not."""
    try:
        note: dict[str, Any] = json.loads(note_path(draft / name).read_text())
    except FileNotFoundError:
        return None
    return note


def publish(draft: Path, target: Path, index_json: str) -> None:
    """From here on the checkpoint exists. A folder is renamed in one step; the index is in it already."""
    write_text(draft / INDEX, index_json)
    for note in draft.glob("rank-*.json"):
        note.unlink()
    flush(draft)
    old = target.with_name(f"{REPLACED}{target.name}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    try:
        draft.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    flush(target.parent)
    write_text(target.parent / LATEST, target.name)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def thin_out(folder: Path, keep: Keep, newest_step: int, metrics: dict[Path, dict[str, float]]) -> None:
    """Remove what `keep` does not ask for. `metrics` remembers what the indices say, from save to save.

    A folder goes by its name first, so that nobody finds half of one.
    """
    found = checkpoints_in(folder)
    for path in found.values():
        if path not in metrics:
            with contextlib.suppress(CheckpointError):  # damaged: it has no metrics, and is kept or not by its step
                metrics[path] = read_index(path).metrics
    said = {step: metrics.get(path, {}) for step, path in found.items()}
    for step in set(said) - keep.chosen(said) - {newest_step}:
        gone = folder / f"{REMOVED}{found[step].name}"
        with contextlib.suppress(OSError):  # what cannot be removed now is tried again after the next save
            found[step].rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
