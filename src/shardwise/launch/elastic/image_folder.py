"""A folder in the host's memory for state that must outlive ranks. The launcher creates it, and removes it at the end.

The folder of a killed launcher is removed by the next one: see [Note: abandoned folders] in `launch/log_folder.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.launch.log_folder import RECORDS, remove_abandoned
from shardwise.launch.orphans import lock_of
from shardwise.system.job_folder import JOB_LOCK, LAUNCHER, LAUNCHER_LOCK, LAUNCHER_STATE, STANDBY_LOCK

MEMORY = Path("/dev/shm")
_OF_THE_JOB = {JOB_LOCK, LAUNCHER_LOCK, STANDBY_LOCK, LAUNCHER, LAUNCHER_STATE, RECORDS}
"""What is not of the ranks of one attempt."""
_CLAIM_SECONDS = 3.0


class Images:
    """A context manager; `folder` is `None` on a system without such memory."""

    def __init__(self, memory: Path = MEMORY) -> None:
        self.folder: Path | None = None
        self._lock, self._claim = -1, -1
        if not memory.is_dir() or not os.access(memory, os.W_OK):
            return
        remove_abandoned(memory)
        draft = Path(tempfile.mkdtemp(prefix=".shardwise-", dir=memory))
        self._lock = os.open(draft / JOB_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._claim = os.open(draft / LAUNCHER_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._claim, fcntl.LOCK_EX)
        self.folder = draft.rename(draft.with_name(draft.name[1:]))

    @classmethod
    def taken_over(cls, folder: Path) -> Images:
        """The folder of a launcher that was killed, from here on this one's: it is removed at the end. Raises
        `LaunchError` if another one has it."""
        deadline = time.monotonic() + _CLAIM_SECONDS
        while (claim := lock_of(folder / LAUNCHER_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
            if not folder.is_dir() or time.monotonic() > deadline:
                raise LaunchError(
                    f"The job of {str(folder)!r} has a launcher, or is over. Only a job that has lost its launcher can "
                    f"be taken over: its ranks print its folder."
                )
            time.sleep(0.01)  # a rank has looked whether there is a launcher
        images = cls.__new__(cls)
        lock = lock_of(folder / JOB_LOCK, fcntl.LOCK_SH)
        images.folder, images._claim, images._lock = folder, claim, -1 if lock is None else lock
        return images

    def clear(self) -> None:
        """Remove all files of ranks, before a new attempt."""
        for path in self.folder.iterdir() if self.folder is not None else ():
            if path.name in _OF_THE_JOB:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def __enter__(self) -> Images:
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            for descriptor in (self._lock, self._claim):
                if descriptor >= 0:
                    os.close(descriptor)
