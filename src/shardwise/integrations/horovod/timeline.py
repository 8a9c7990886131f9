"""What collectives wait for and do, as a trace in Chrome's format: chrome://tracing and Perfetto open it.

Rank 0 writes. Each tensor has a row. `NEGOTIATE_ALLREDUCE` lasts from the first rank that has issued it to the last,
with a mark for each, so that who is late shows; then come the parts of carrying it out.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import TextIO

from shardwise.errors import ConfigError


class Timeline:
    """Writes nothing until `start`. Called from several threads."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        self._rows: dict[str, int] = {}
        self._open: set[str] = set()
        self._is_first = True

    def start(self, path: str) -> None:
        """Rank 0 opens the file, in place of one that is being written; others do nothing."""
        self.stop()
        if self._rank != 0:
            return
        try:
            file = Path(path).open("w")  # noqa: SIM115 (open for as long as it is written)
        except OSError as error:
            raise ConfigError(f"The timeline cannot be written: {error}.") from error
        with self._lock:
            self._rows.clear()
            self._open.clear()
            self._is_first = True
            file.write("[\n")
            self._file = file

    def stop(self) -> None:
        with self._lock:
            file, self._file = self._file, None
            if file is not None:
                file.write("\n]\n")
                file.close()

    def negotiated(self, name: str, what: str, rank: int) -> None:
        """From the coordinator: what begins, each `rank` that has issued it, `end`."""
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

    def executed(self, names: tuple[str, ...], what: str, began: float, ended: float) -> None:
        """From the thread that carries out: `what`, between two moments of `time.perf_counter()`."""
        if self._file is None:
            return
        with self._lock:
            for name in names:
                self._write(name, {"ph": "X", "name": what, "dur": round(1e6 * (ended - began))}, began)

    def _write(self, name: str, event: dict[str, object], moment: float | None = None) -> None:
        if self._file is None:
            return
        pid = os.getpid()
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            named = {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": name}}
            self._put(named)
        now = time.perf_counter() if moment is None else moment
        self._put({**event, "pid": pid, "tid": row, "ts": round(1e6 * now)})

    def _put(self, event: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(("" if self._is_first else ",\n") + json.dumps(event))
        self._is_first = False
