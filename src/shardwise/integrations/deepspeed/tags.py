"""The file `latest` in a folder of checkpoints, which contains the newest tag, as in DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.safe_files import read_text

LATEST = "latest"


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
    draft = folder / f".{LATEST}.draft"
    draft.write_text(tag)
    draft.replace(folder / LATEST)
