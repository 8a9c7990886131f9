"""The folder with the records of a job's ranks: the user's log directory, or a temporary one.

[Note: abandoned folders] A launcher that is killed leaves its folder behind, and the next launcher of the same user
removes it. A file lock, which the system releases with the process, tells whether a launcher is alive. A process id
would not, since several containers may share the temporary directory.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from shardwise.launch.outcome import Outcome
from shardwise.launch.ranks import RankFiles

LOCK = "launcher.lock"


class Folder:
    """`attempt-<k>/rank-<n>/` with `error.json`, and with a log directory `stdout.log`, `stderr.log`."""

    def __init__(self, log_dir: Path | None) -> None:
        self._keep = log_dir is not None
        self._lock = -1
        if log_dir is not None:
            self._root = log_dir.absolute()
            return
        remove_abandoned()
        draft = Path(tempfile.mkdtemp(prefix=".shardwise-"))
        self._lock = os.open(draft / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._root = draft.rename(draft.with_name(draft.name[1:]))  # never visible without its lock

    def files(self, attempt: int, rank: int) -> RankFiles:
        """The paths of one rank."""
        folder = self._root / f"attempt-{attempt}" / f"rank-{rank}"
        error = folder / "error.json"
        if not self._keep:
            return RankFiles(error)
        return RankFiles(error, folder / "stdout.log", folder / "stderr.log")

    def place(self, attempt: int) -> Path | None:
        """The directory with an attempt's logs; None when none are kept."""
        return self._root / f"attempt-{attempt}" if self._keep else None

    def add_tracebacks(self, attempt: int, outcomes: list[Outcome]) -> None:
        """Append to the logs the tracebacks that ranks recorded and did not print."""
        for outcome in outcomes:
            log = self.files(attempt, outcome.rank).stderr
            if log is not None and outcome.traceback:
                log.parent.mkdir(parents=True, exist_ok=True)
                with log.open("a") as stream:
                    stream.write(outcome.traceback)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove folders in `parent`, by default the temporary directory, of this user's launchers that have died; see
    [Note: abandoned folders]."""
    for folder in (parent or Path(tempfile.gettempdir())).glob("shardwise-*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # not a launcher's, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its launcher is alive
        finally:
            os.close(lock)
