"""A folder in the host's memory for state that must outlive ranks. The launcher creates it, and removes it at the end.

The folder of a killed launcher is removed by the next one: see [Note: abandoned folders] in `launch/log_folder.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from shardwise.launch.log_folder import LOCK, remove_abandoned

MEMORY = Path("/dev/shm")


class Images:
    """A context manager; `folder` is `None` on a system without such memory."""

    def __init__(self, memory: Path = MEMORY) -> None:
        self.folder: Path | None = None
        self._lock = -1
        if not memory.is_dir() or not os.access(memory, os.W_OK):
            return
        remove_abandoned(memory)
        draft = Path(tempfile.mkdtemp(prefix=".shardwise-", dir=memory))
        self._lock = os.open(draft / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = draft.rename(draft.with_name(draft.name[1:]))

    def clear(self) -> None:
        """Remove all files of ranks, before a new attempt."""
        for path in self.folder.iterdir() if self.folder is not None else ():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def __enter__(self) -> Images:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)
