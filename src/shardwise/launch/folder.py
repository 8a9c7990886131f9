"""Where the records of a job's ranks are kept: the user's log directory, or one that goes away.

[Note: folders of the dead] A launcher that is killed leaves its folder behind, and the next one of the same user takes
it away. It knows by a lock that the system lets go of with the process; a process number would not tell, where the
temporary directory is that of several containers.
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
        clear_away()
        draft = Path(tempfile.mkdtemp(prefix=".shardwise-"))
        self._lock = os.open(draft / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._root = draft.rename(draft.with_name(draft.name[1:]))  # nobody sees it unlocked

    def files(self, attempt: int, rank: int) -> RankFiles:
        """The paths of one rank."""
        place = self._root / f"attempt-{attempt}" / f"rank-{rank}"
        error = place / "error.json"
        if not self._keep:
            return RankFiles(error)
        return RankFiles(error, place / "stdout.log", place / "stderr.log")

    def place(self, attempt: int) -> Path | None:
        """The directory that stays behind after an attempt; None when nothing stays."""
        return self._root / f"attempt-{attempt}" if self._keep else None

    def add_tracebacks(self, attempt: int, outcomes: list[Outcome]) -> None:
        """Complete the logs with what a rank left to the launcher to print."""
        for outcome in outcomes:
            log = self.files(attempt, outcome.rank).stderr
            if log is not None and outcome.traceback:
                with log.open("a") as stream:
                    stream.write(outcome.traceback)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)


def clear_away(place: Path | None = None) -> None:
    """Remove what launchers of this user that are dead have left; see [Note: folders of the dead].

    In `place`, by default the temporary directory.
    """
    for folder in (place or Path(tempfile.gettempdir())).glob("shardwise-*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # not of a launcher, or of another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its launcher lives
        finally:
            os.close(lock)
