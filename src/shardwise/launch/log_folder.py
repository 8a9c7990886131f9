"""The folder with the records of a job's ranks: the user's log directory, or a temporary one.

[Note: abandoned folders] A launcher that is killed leaves its folder behind, and the next launcher of the same user
removes it. A file lock, which the system releases with the process, tells whether a launcher is alive. A process id
would not, since several containers may share the temporary directory. The folder of an elastic job is locked by its
ranks, and by the process that takes over from its launcher, as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from shardwise.launch.outcome import Outcome
from shardwise.launch.ranks import RankFiles
from shardwise.system.job_folder import JOB_LOCK

RECORDS, STATUS = "records", "exit-status"


class Folder:
    """`attempt-<k>/rank-<n>/` with `error.json`, and with a log directory `stdout.log`, `stderr.log`."""

    def __init__(self, log_dir: Path | None, within: Path | None = None) -> None:
        """Without a `log_dir` it is in the folder `within`, which somebody else removes, or in a temporary one."""
        self._keep = log_dir is not None
        self._lock = -1
        if log_dir is not None:
            self._root = log_dir.absolute()
            with contextlib.suppress(OSError):
                (self._root / STATUS).unlink()  # of an earlier job
            return
        if within is not None:
            self._root = within / RECORDS
            return
        remove_abandoned()
        draft = Path(tempfile.mkdtemp(prefix=".shardwise-"))
        self._lock = os.open(draft / JOB_LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._root = draft.rename(draft.with_name(draft.name[1:]))  # never visible without its lock

    def files(self, attempt: int, rank: int) -> RankFiles:
        """The paths of one rank."""
        return self.files_beside(self._root / f"attempt-{attempt}" / f"rank-{rank}" / "error.json")

    def files_beside(self, error: Path) -> RankFiles:
        """The paths of the rank with this error file."""
        return RankFiles.with_output(error) if self._keep else RankFiles(error)

    def place(self, attempt: int) -> Path | None:
        """The directory with an attempt's logs; None when none are kept."""
        return self._root / f"attempt-{attempt}" if self._keep else None

    def write_status(self, status: int) -> None:
        """Leave the job's exit status in the log directory, for whoever is not the parent of this process."""
        if self._keep:
            self._root.mkdir(parents=True, exist_ok=True)
            (self._root / STATUS).write_text(f"{status}\n")

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
        if self._lock >= 0:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove folders in `parent`, by default the temporary directory, of this user's launchers that have died; see
    [Note: abandoned folders]."""
    for folder in (parent or Path(tempfile.gettempdir())).glob("shardwise-*"):
        try:
            lock = os.open(folder / JOB_LOCK, os.O_RDWR)
        except OSError:  # not a launcher's, or another user's
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its launcher is alive
        finally:
            os.close(lock)
