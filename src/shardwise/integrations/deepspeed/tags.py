"""The file `latest` in a folder of checkpoints, which contains the newest tag, as in DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise import World
from shardwise.errors import CheckpointError
from shardwise.system.safe_files import read_text, replaced

LATEST = "latest"


class TagError(CheckpointError, AssertionError):
    """Ranks that give one checkpoint different tags; an `AssertionError` in DeepSpeed."""


def agreed_tag(world: World, tag: str, validation: str) -> str:
    """The tag of rank 0. All ranks call; see `DeepSpeedEngine.save_checkpoint`."""
    tags = [message.decode() for message in world.exchange(tag.encode(), "tag of a checkpoint")]
    if len(set(tags)) > 1:
        words = f"Ranks gave different tags to one checkpoint: {', '.join(sorted(set(tags))[:3])}."
        if validation == "fail":
            raise TagError(f"{words} Give the same on all ranks (checkpoint.tag_validation is fail).")
        if validation == "warn" and world.rank == 0:
            print(f"shardwise: {words} It gets rank 0's, {tags[0]}.")
    return tags[0]


def latest_tag(folder: Path) -> str | None:
    """The tag in `folder/latest`, which must be a plain name, so that it cannot lead out of the folder."""
    if not os.path.lexists(folder / LATEST):
        return None
    name = read_text(folder / LATEST).strip()
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise CheckpointError(f"{folder / LATEST} contains {name!r}, which is not the name of a folder in {folder}.")
    return name


def write_latest(folder: Path, tag: str) -> None:
    """Replace the tag in `folder/latest`."""
    with replaced(folder / LATEST) as draft:
        draft.write_text(tag, encoding="utf-8")
