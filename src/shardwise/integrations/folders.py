"""Folders that others own, and what of ours goes into them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shardwise as sw

STATE_FOLDER = "shardwise"
"""Inside a checkpoint of another library: parameters and optimizer states, in our format."""


@contextmanager
def beside(folder: Path, engine: sw.Engine) -> Iterator[Path]:
    """A new folder to write into, the same on all ranks; what rank 0 finds there on leaving goes into `folder`.

    All ranks enter and leave. Files of the same name are replaced, others stay.
    """
    mine = ""
    if engine.world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        mine = tempfile.mkdtemp(prefix=".weights-", dir=folder)
    draft = Path(engine.world.exchange(mine.encode(), "folder")[0].decode())
    try:
        yield draft / "files"
        if engine.world.rank == 0:
            for file in sorted((draft / "files").iterdir()):
                file.replace(folder / file.name)
    finally:
        if engine.world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
