"""Notes of ranks about a run besides numbers: late ranks, and errors.

Each rank writes a file of its own, and only when there is a note. So the fault that the other ranks saw is recorded
even if the rank that writes the record has died.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.observe.run_files import NOTES
from shardwise.system import plain_data
from shardwise.system.safe_files import read_own_bytes

LOGGER = "shardwise"
_MAX_BYTES = 2**26
"""Of the notes of one rank: more than anybody reads."""


@dataclass(frozen=True)
class Note:
    """One note. `time` is in seconds since the epoch; `level` is `warning` or `error`."""

    time: float
    rank: int
    level: str
    text: str


class Notes(logging.Handler):
    """Writes this rank's warnings from the library's logger, and the errors given to `error`."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.rank = rank
        self._path = folder / NOTES.replace("*", str(rank))
        logging.getLogger(LOGGER).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Called in the thread that logs, which is that of the watch."""
        self._write("warning", record.getMessage())

    def error(self, error: BaseException) -> None:
        """Write the error that ended the run on this rank."""
        self._write("error", in_words(error))

    def close(self) -> None:
        logging.getLogger(LOGGER).removeHandler(self)
        super().close()

    def _write(self, level: str, text: str) -> None:
        line = {"time": time.time(), "rank": self.rank, "level": level, "text": text}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            pass  # failing to write a note must not end the run, or hide the error in the note


def in_words(error: BaseException) -> str:
    """Its type and text; Ctrl-C has no text."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def read_notes(folder: Path) -> list[Note]:
    """The notes of all ranks sorted by time. Torn or foreign lines are skipped, as are files that cannot be read, and
    links."""
    found = [note for path in folder.glob(NOTES) for note in _in_file(path)]
    return sorted(found, key=lambda note: note.time)


def _in_file(path: Path) -> Iterator[Note]:
    try:
        texts = read_own_bytes(path, _MAX_BYTES).decode(errors="replace").splitlines()
    except (CheckpointError, OSError):
        return
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            line = plain_data.read(text, {"time": float, "rank": int, "level": str, "text": str})
            yield Note(float(line["time"]), line["rank"], line["level"], line["text"])
