"""Our files inside the checkpoint folders of other libraries."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shardwise as sw

STATE_FOLDER = "shardwise"
"""The subfolder with parameters and optimizer states in our format."""


@contextmanager
def staged(folder: Path, engine: sw.Engine) -> Iterator[Path]:
    """Give all ranks the same temporary folder to write into; at the end, rank 0 moves its files into `folder`.

    Collective. Files of the same name are replaced, others are kept.
    """
    created = ""
    if engine.world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        created = tempfile.mkdtemp(prefix=".weights-", dir=folder)
    draft = Path(engine.world.exchange(created.encode(), "folder")[0].decode())
    try:
        yield draft / "files"
        if engine.world.rank == 0:
            for file in sorted((draft / "files").iterdir()):
                file.replace(folder / file.name)
    finally:
        if engine.world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
