"""The record of a run: one JSON object per line, written as things happen.

    {"kind": "run", "started": "...", "world_size": 2, "plan": {...}, "versions": {...}, "process": {...}}
    {"kind": "step", "step": 1, "loss": 5.54, ...}
    {"kind": "validation", "step": 50, "loss": 3.1}
    {"kind": "resume", "step": 50, "started": "...", "world_size": 4, ...}
    {"kind": "end", "step": 90, "status": "failed", "error": "..."}

docs/seeing.md lists all kinds of lines. Every line is flushed, so a killed run leaves everything it did and at most one
torn line at the end. `step` is the number of finished steps. A run resumed from step 50 drops what its predecessor
recorded after step 50: those steps are taken again, and each step has one line.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import platform
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from shardwise.errors import ShardwiseError
from shardwise.observe.lines import Line, is_line
from shardwise.system.safe_files import MAX_JSON_DEPTH, nests_deeper, regular_descriptor, replaced
from shardwise.version import __version__

_LOG = logging.getLogger(__name__)
_MAX_LINE_BYTES = 2**26
"""More than any line has: of ten thousand ranks it is a few MiB."""


@dataclass(frozen=True)
class Record:
    """A record that was read: its header, and every complete line after it."""

    header: Line
    lines: list[Line]
    num_damaged: int = 0
    """Lines that were left out, if the reader may do that."""

    def column(self, name: str, kind: str = "step") -> list[tuple[int, float]]:
        """`(step, value)` of every line of `kind` that has a finite number called `name`, sorted by step."""
        points = [(line["step"], line[name]) for line in self.lines if line["kind"] == kind and _number(line.get(name))]
        return sorted(points)


@contextlib.contextmanager
def warns_if_unwritable(what: object, errors: type[Exception] = OSError) -> Iterator[None]:
    """Inside `with`, an `OSError` becomes a warning: a run must not end because a disk for its records is full. With
    `Exception` any error does, where a library writes that has errors of its own."""
    try:
        yield
    except errors as error:
        reason = getattr(error, "strerror", None) or error
        _LOG.warning("%s cannot be written: %s. Training continues without it.", what, reason)


class RunRecord:
    """Appends lines to one record. Only one rank writes it; `close()` it, or use it in a `with`.

    A run must not end because its record cannot be written, so only the beginning raises `OSError`. Later lines that a
    full disk does not take are counted, and named by warnings at the first one and when lines fit again.
    """

    def __init__(self, path: Path, lines: list[Line]) -> None:
        """Replace whatever is at `path` by `lines`, atomically, and append to it."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as draft:
            draft.write_text("".join(_text(line) for line in lines), encoding="utf-8")
        self._file = path.open("ab", buffering=0)
        self._writing = threading.Lock()
        self._num_lost = 0

    @classmethod
    def start(cls, path: str | Path, *, plan: Mapping[str, Any], world_size: int, **more: object) -> RunRecord:
        """Begin a new record, replacing an existing one. `more` is added to the header."""
        return cls(Path(path), [{**_header("run", plan, world_size), **more}])

    @classmethod
    def resume(
        cls, path: str | Path, *, step: int, plan: Mapping[str, Any], world_size: int, **more: object
    ) -> RunRecord:
        """Continue after `step`: later lines of the old run are dropped, except its faults. A missing record is
        begun. Damaged lines are dropped with a warning, and a file that is no record is kept beside the one that is
        begun, since a run must not end because of its record."""
        path = Path(path)
        if not path.exists():
            return cls.start(path, plan=plan, world_size=world_size, **more)
        try:
            old = RecordReader(path, keep=lambda line: line).read()
        except ShardwiseError as error:
            aside = path.with_suffix(f".damaged-{secrets.token_hex(4)}")
            path.rename(aside)
            _LOG.warning("%s What was there is now %s, and the record begins anew after step %d.", error, aside, step)
            return cls.start(path, plan=plan, world_size=world_size, **more)
        if old.num_damaged:
            _LOG.warning("%s had damaged lines (%d), which were dropped.", path, old.num_damaged)
        kept = [line for line in old.lines if line["step"] <= step or line["kind"] == "fault"]
        return cls(path, [old.header, *kept, {**_header("resume", plan, world_size), **more, "step": step}])

    def write(self, kind: str, *, step: int, **values: object) -> None:
        """Write one line, visible to readers on return. Numbers that are not finite become null. Any thread may
        call."""
        line = _text({"kind": kind, "step": step, **values}).encode()
        with self._writing:
            try:
                self._append(line)
            except OSError as error:
                self._num_lost += 1
                if self._num_lost == 1:
                    _LOG.warning(
                        "The run's record %s cannot be written: %s. Training continues, but lines are lost until this "
                        "is possible again.",
                        self.path,
                        error.strerror,
                    )
                return
            if self._num_lost:
                _LOG.warning("The run's record %s is written again; %d lines are missing.", self.path, self._num_lost)
                self._num_lost = 0

    def _append(self, line: bytes) -> None:
        """Write the line, or nothing of it. Raises `OSError`."""
        num_written = self._file.write(line) or 0
        if num_written == len(line):
            return
        end = self._file.tell()
        if os.fstat(self._file.fileno()).st_size == end:  # else a launcher has written behind it
            self._file.truncate(end - num_written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_record(path: str | Path) -> Record:
    """Read a record, also while it is being written or after a crash: a torn last line is skipped. Raises
    `ShardwiseError`."""
    return RecordReader(Path(path)).read()


class RecordReader:
    """Reads one record, any number of times; each time only what was added since."""

    def __init__(
        self, path: Path, keep: Callable[[Line], Line | None] | None = None, *, follows_links: bool = True
    ) -> None:
        """Without `keep`, a damaged line is an error. With it damaged lines are counted, and others replaced by what
        `keep` returns, or counted too if that is None. A link at `path` is followed if a user has named that path."""
        self._path = path
        self._follows_links = follows_links
        self._keep = keep
        self._file_number = -1
        self._begin()

    def _begin(self) -> None:
        self._offset = self._num_read = self._num_damaged = 0
        self._header: Line | None = None
        self._lines: list[Line] = []

    def read(self) -> Record:
        """Everything that is there by now. Raises `ShardwiseError`."""
        with self._opened() as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file_number or found.st_size < self._offset:  # a resumed run writes a new file
                self._file_number = found.st_ino
                self._begin()
            file.seek(self._offset)
            while (line := file.readline(_MAX_LINE_BYTES)) and (line.endswith(b"\n") or len(line) == _MAX_LINE_BYTES):
                self._offset += len(line)
                self._num_read += 1
                self._take(line)
        if self._header is None:
            raise ShardwiseError(self._no_header())
        return Record(self._header, self._lines, self._num_damaged)

    def _opened(self) -> BinaryIO:
        try:
            return os.fdopen(regular_descriptor(self._path, follows_links=self._follows_links), "rb")
        except FileNotFoundError:
            raise ShardwiseError(f"There is no run record at {self._path}. Give the record.jsonl of a run.") from None
        except OSError as error:
            raise ShardwiseError(f"The record {self._path} cannot be read: {error.strerror}.") from error

    def _take(self, text: bytes) -> None:
        try:
            line: Line | None = _parse(self._path, self._num_read, text)
        except ShardwiseError:
            if self._keep is None or self._header is None:
                raise
            line = None
        if self._keep is not None and line is not None:
            line = self._keep(line)
        if line is None:
            self._num_damaged += 1
        elif self._header is not None:
            self._lines.append(line)
        elif line["kind"] != "run":
            raise ShardwiseError(self._no_header())
        else:
            self._header = line

    def _no_header(self) -> str:
        if self._num_read == 0:
            return f"{self._path} is empty: the run has not begun to write it, or was ended before it did."
        return f'{self._path} is not a run record: its first line should say "kind": "run".'


def _header(kind: str, plan: Mapping[str, Any], world_size: int) -> Line:
    versions = {
        "shardwise": __version__,
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return {
        "kind": kind,
        "started": started,
        "world_size": world_size,
        "plan": dict(plan),
        "versions": versions,
        "process": _this_process(),
    }


def _this_process() -> dict[str, Any]:
    """Identifies the writer, so that a reader can tell whether it is alive: process ids are reused, and containers
    that share the host's name have their own."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "created": psutil.Process().create_time(),
        "pid_namespace": pid_namespace(),
    }


def pid_namespace() -> str:
    """What tells process ids of this container from those of others; empty where the system does not say."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(line: Line) -> str:
    return json.dumps(_finite(line), allow_nan=False) + "\n"


def _finite(value: object) -> object:
    """`value` with null for every number that JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parse(path: Path, number: int, text: bytes) -> Line:
    try:
        if nests_deeper(text, MAX_JSON_DEPTH):
            raise ValueError(f"it nests more than {MAX_JSON_DEPTH} lists and objects")
        line = json.loads(text.decode(errors="replace"), parse_constant=lambda _: None)
    except ValueError as error:
        raise ShardwiseError(
            f"{path}, line {number} is damaged: {error}. Take the line out, or start the run over."
        ) from error
    if not is_line(line):
        raise ShardwiseError(f"{path}, line {number} has no kind and step; take the line out, or start the run over.")
    return dict(line)
