"""A folder of checkpoints: drafts, publishing, finding and removing.

step-00000100/                 a checkpoint: one file per rank, and the index
latest                         the name of the checkpoint to resume from
.writing-step-00000200-...     a draft, which is never read
.replaced-step-00000100        the previous checkpoint of a step, while the step is written anew
.lock                          the process that writes here
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.index import INDEX, MAX_INDEX_BYTES
from shardwise.checkpoint.index_schema import read_index
from shardwise.checkpoint.keep import Keep
from shardwise.checkpoint.write import flush, note_path, put_in_place, remove_replaced, write_text
from shardwise.errors import CheckpointError, some
from shardwise.system.safe_files import read_own_text
from shardwise.system.units import format_bytes

LATEST = "latest"
STEP, WRITING, REPLACED, REMOVED = "step-", ".writing-", ".replaced-", ".removed-"
MAX_NAME_BYTES = 4096
SPARE_BYTES = 2**20
"""Allowance for what is written besides the tensors' bytes: notes and the index."""


class AfterwardsError(CheckpointError):
    """The checkpoint exists, but a later operation failed. The message is complete."""


def step_name(step: int) -> str:
    return f"{STEP}{step:08d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Every checkpoint of the folder, by step. A replaced one whose replacement was cut short counts for its step."""
    try:
        names = sorted(os.listdir(folder))  # unlike a glob, it raises if access is denied
    except (FileNotFoundError, NotADirectoryError):
        return {}
    found: dict[int, Path] = {}
    for prefix in (REPLACED, ""):
        for name in names:
            number = _step_of(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if number is not None and (folder / name / INDEX).exists():
                found[number] = folder / name
    return dict(sorted(found.items()))


def newest(folder: Path) -> Path | None:
    """The checkpoint to resume from: what `latest` names, else the highest step; `None` if there is none.

    `folder` may also be a checkpoint itself, or the file `latest`. Raises `CheckpointError` if `latest` names a missing
    one: whether to take an older one instead is the user's decision. So it does for another file, and for the folder of
    a checkpoint that is missing or not whole, where `None` would begin the run anew.
    """
    if folder.name == LATEST and folder.is_file():
        folder = folder.parent
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file. Give the folder that checkpoints are saved in, or that of one checkpoint."
        )
    if (folder / INDEX).exists():
        return folder
    if _step_of(folder.name) is not None and not folder.exists():
        raise CheckpointError(f"There is no checkpoint {folder}.{_advice(checkpoints_in(folder.parent))}")
    found = checkpoints_in(folder)
    try:
        named = read_own_text(folder / LATEST, MAX_NAME_BYTES).strip()
    except (FileNotFoundError, NotADirectoryError):
        if not found and folder.is_dir() and _step_of(folder.name) is not None:
            raise CheckpointError(f"{folder} has no {INDEX}, so it is not a whole checkpoint.") from None
        return _no_link(found[max(found)]) if found else None
    except OSError as error:
        raise CheckpointError(f"{folder / LATEST} cannot be read: {error}.{_advice(found)}") from error
    number = _step_of(named)
    if number is None:
        raise CheckpointError(
            f"{folder / LATEST} says {named[:80]!r}, which is not the name of a shardwise checkpoint.{_advice(found)}"
        )
    if number not in found:
        raise CheckpointError(
            f"{folder / LATEST} names {named}, but there is no checkpoint of that name: it was removed, or its {INDEX} "
            f"was.{_advice(found)}"
        )
    return _no_link(found[number])


def _step_of(name: str) -> int | None:
    """The step in the name of a checkpoint's folder; `None` for another name."""
    number = name.removeprefix(STEP)
    is_number = number.isascii() and number.isdecimal() and len(number) < 20
    return int(number) if is_number and step_name(int(number)) == name else None


def _no_link(path: Path) -> Path:
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link, which is not followed. Give the path of the checkpoint itself."
        )
    return path


def _advice(found: Mapping[int, Path]) -> str:
    """The checkpoints that exist instead, newest first, and how to resume from one."""
    if not found:
        return " There is no other checkpoint in that folder."
    paths = [found[step] for step in sorted(found, reverse=True)]
    names = some((path.name for path in paths), 3)
    return f" There are {names}. To continue from one of them, give its path: {str(paths[0])!r}."


def tidy(folder: Path) -> None:
    """Remove what a killed job has left. Requires the lock."""
    for path in folder.glob(f"{REPLACED}{STEP}*"):
        target = path.with_name(path.name.removeprefix(REPLACED))
        if not target.exists():
            path.rename(target)
    for prefix in (WRITING, REPLACED, REMOVED):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def check_room(folder: Path, num_bytes: int, free_bytes: int) -> None:
    """Raise `CheckpointError` unless that much fits, with what is written besides."""
    if num_bytes + SPARE_BYTES > free_bytes:
        raise CheckpointError(
            f"A checkpoint in {folder} takes {format_bytes(num_bytes + SPARE_BYTES)}, but its file system has "
            f"{format_bytes(free_bytes)} free. Free some space, or keep fewer checkpoints with Keep(last=...)."
        )


def read_note(draft: Path, name: str) -> dict[str, Any] | None:
    """A rank's note about its finished file; `None` until there is one."""
    try:
        text = read_own_text(note_path(draft / name), MAX_INDEX_BYTES)
    except FileNotFoundError:
        return None
    if not text:  # see `leave_refusal`
        return {"error": f"its file could not be written, nor a note why. Is the file system of {draft.parent} full?"}
    note: dict[str, Any] = json.loads(text)
    return note


def publish(draft: Path, target: Path, index_json: str) -> None:
    """Make the checkpoint appear: the folder, which contains the index already, is renamed atomically."""
    write_text(draft / INDEX, index_json)
    for note in draft.glob("rank-*.json"):
        note.unlink()
    flush(draft)
    old = target.with_name(f"{REPLACED}{target.name}")
    try:
        put_in_place(draft, target, old)
        _name_latest(target)
    finally:
        remove_replaced(old, target)


def _name_latest(target: Path) -> None:
    try:
        flush(target.parent)
        write_text(target.parent / LATEST, target.name)
        flush(target.parent)
    except OSError as error:
        raise AfterwardsError(
            f"The checkpoint {target} is written, but {target.parent / LATEST} could not be updated ({error}). "
            f"To continue from it, call resume({str(target)!r})."
        ) from error


def thin_out(folder: Path, keep: Keep, newest_step: int, metrics: dict[Path, dict[str, float]]) -> None:
    """Remove what `keep` does not ask for. `metrics` caches the metrics of the indices from save to save.

    Later steps than `newest_step` are of an earlier run. They do not count, and stay until this run comes to them;
    otherwise they would take the places of its own. A folder is renamed before it is removed, so that a half-removed
    one is never found. While none has the metric that decides which is best, all are kept: which it is cannot be known.
    """
    found = {step: path for step, path in checkpoints_in(folder).items() if step <= newest_step}
    for path in found.values():
        if path not in metrics:
            with contextlib.suppress(CheckpointError):  # damaged: it has no metrics, and is kept or not by its step
                metrics[path] = read_index(path).metrics
    by_step = {step: metrics.get(path, {}) for step, path in found.items()}
    if keep.best is not None and not any(keep.best in own for own in by_step.values()):
        logging.getLogger("shardwise").warning(
            "keep=Keep(best=%r): no checkpoint in %s has that metric%s, so none is removed. Give it: engine.save(..., "
            "metrics={%r: ...}).",
            keep.best,
            folder,
            "".join(f", but {name!r}" for name in sorted({name for own in by_step.values() for name in own})),
            keep.best,
        )
        return
    for step in set(by_step) - keep.chosen(by_step) - {newest_step}:
        gone = folder / f"{REMOVED}{found[step].name}"
        with contextlib.suppress(OSError):  # it is tried again after the next save
            found[step].rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
