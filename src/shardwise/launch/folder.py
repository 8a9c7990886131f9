"""Where the records of a job's ranks are kept: the user's log directory, or one that goes away."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from shardwise.launch.outcome import Outcome
from shardwise.launch.ranks import RankFiles


class Folder:
    """`attempt-<k>/rank-<n>/` with `error.json`, and with a log directory `stdout.log`, `stderr.log`."""

    def __init__(self, log_dir: Path | None) -> None:
        self._keep = log_dir is not None
        self._root = log_dir.absolute() if log_dir else Path(tempfile.mkdtemp(prefix="shardwise-"))

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
