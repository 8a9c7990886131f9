"""The timeline: a trace of all collectives in Chrome's format, for chrome://tracing and Perfetto.

Rank 0 writes it. Each tensor has a row. `NEGOTIATE_ALLREDUCE` begins when the first rank has issued the tensor and ends
when the last has; an instant event for each rank shows which ranks are late. The execution follows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TextIO

from shardwise.errors import ConfigError

_log = logging.getLogger("shardwise")


class Timeline:
    """Writes nothing until `start`. Any thread may call it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open: set[str] = set()
        self._is_first = True

    def start(self, path: str) -> None:
        """On rank 0, close any open trace and begin one at `path`; on other ranks do nothing.

        Raises `ConfigError` if the file cannot be opened.
        """
        self.stop()
        if self._rank != 0:
            return
        try:
            file = Path(path).open("w")  # noqa: SIM115 (stays open until `stop`)
        except OSError as error:
            raise ConfigError(f"The timeline cannot be written: {error}.") from error
        with self._lock:
            self._rows.clear()
            self._open.clear()
            self._is_first = True
            file.write("[\n")
            self._file = file

    def stop(self) -> None:
        """Complete and close the trace."""
        with self._lock:
            if self._file is not None:
                self._append("\n]\n")
                self._close()

    def negotiated(self, name: str, what: str, rank: int) -> None:
        """Called by the coordinator: `what` is the name of the phase that begins, `rank`, or `end`."""
        if self._file is None:
            return
        with self._lock:
            if what == "rank":
                self._write(name, {"ph": "i", "name": str(rank), "s": "t"})
            elif what != "end":
                self._open.add(name)
                self._write(name, {"ph": "B", "name": what})
            elif name in self._open:
                self._open.discard(name)
                self._write(name, {"ph": "E"})

    def executed(self, names: tuple[str, ...], what: str, start: float, end: float) -> None:
        """Called by the executor. `start` and `end` are values of `time.perf_counter()`."""
        if self._file is None:
            return
        with self._lock:
            for name in names:
                self._write(name, {"ph": "X", "name": what, "dur": round(1e6 * (end - start))}, start)

    def _write(self, name: str, event: dict[str, object], seconds: float | None = None) -> None:
        pid = os.getpid()
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write_event({"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": name}})
        seconds = time.perf_counter() if seconds is None else seconds
        self._write_event({**event, "pid": pid, "tid": row, "ts": round(1e6 * seconds)})

    def _write_event(self, event: dict[str, object]) -> None:
        self._append(("" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False

    def _append(self, text: str) -> None:
        """Write `text`. A failure, such as a full disk, ends the timeline, but not the job."""
        if self._file is None:
            return
        try:
            self._file.write(text)
        except OSError as error:
            self._give_up(error)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        _log.warning("The timeline ends here, since it cannot be written: %s.", error)
        if file is not None:
            with contextlib.suppress(OSError):  # closing flushes again
                file.close()
