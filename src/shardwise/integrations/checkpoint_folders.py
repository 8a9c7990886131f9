"""Our files inside the checkpoint folders of other libraries."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import shardwise as sw
from shardwise.comm.agreed import agreed
from shardwise.errors import CheckpointError

STATE_FOLDER = "shardwise"
"""The subfolder with parameters and optimizer states in our format."""


@contextmanager
def staged(folder: Path, engine: sw.Engine) -> Iterator[Path]:
    """Give all ranks the same temporary folder to write into; at the end, rank 0 moves its files into `folder`.

    Collective: all raise `CheckpointError` if rank 0 cannot write. Files of the same name are replaced, others are
    kept.
    """
    with agreed(engine.world, "folder", CheckpointError) as told:
        if engine.world.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            told.mine = tempfile.mkdtemp(prefix=".weights-", dir=folder)
    draft = Path(told.by_rank[0])
    try:
        yield draft / "files"
        with agreed(engine.world, "folder", CheckpointError):
            if engine.world.rank == 0:
                for file in sorted((draft / "files").iterdir()):
                    file.replace(folder / file.name)
    finally:
        if engine.world.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
