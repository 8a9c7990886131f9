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

import json
import math
import os
import platform
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from shardwise.errors import ShardwiseError
from shardwise.version import __version__

Line = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A record that was read: its header, and every complete line after it."""

    header: Line
    lines: list[Line]

    def column(self, name: str, kind: str = "step") -> list[tuple[int, float]]:
        """`(step, value)` of every line of `kind` that has a finite number called `name`, sorted by step."""
        points = [(line["step"], line[name]) for line in self.lines if line["kind"] == kind and _number(line.get(name))]
        return sorted(points)


class RunRecord:
    """Appends lines to one record. Only one rank writes it; `close()` it, or use it in a `with`."""

    def __init__(self, path: Path, lines: list[Line]) -> None:
        """Replace whatever is at `path` by `lines`, atomically, and append to it."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text("".join(_text(line) for line in lines), encoding="utf-8")
        os.replace(fresh, path)
        self._file = path.open("a", encoding="utf-8")
        self._writing = threading.Lock()

    @classmethod
    def start(cls, path: str | Path, *, plan: Mapping[str, Any], world_size: int, **more: object) -> RunRecord:
        """Begin a new record, replacing an existing one. `more` is added to the header."""
        return cls(Path(path), [{**_header("run", plan, world_size), **more}])

    @classmethod
    def resume(
        cls, path: str | Path, *, step: int, plan: Mapping[str, Any], world_size: int, **more: object
    ) -> RunRecord:
        """Continue after `step`: later lines of the old run are dropped, except its faults. A missing record is
        begun."""
        path = Path(path)
        if not path.exists():
            return cls.start(path, plan=plan, world_size=world_size, **more)
        old = read_record(path)
        kept = [line for line in old.lines if line["step"] <= step or line["kind"] == "fault"]
        return cls(path, [old.header, *kept, {**_header("resume", plan, world_size), **more, "step": step}])

    def write(self, kind: str, *, step: int, **values: object) -> None:
        """Write one line, visible to readers on return. Numbers that are not finite become null. Any thread may
        call."""
        with self._writing:
            self._file.write(_text({"kind": kind, "step": step, **values}))
            self._file.flush()

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
    path = Path(path)
    try:
        texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        raise ShardwiseError(f"There is no run record at {path}. Give the record.jsonl of a run.") from None
    whole = texts[:-1]  # after the last line break: nothing, or an incomplete line
    lines = [_parse(path, number, text) for number, text in enumerate(whole, start=1)]
    if not lines or lines[0].get("kind") != "run":
        raise ShardwiseError(f'{path} is not a run record: its first line should say "kind": "run".')
    return Record(lines[0], lines[1:])


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
    """Identifies the writer, so that a reader can tell whether it is alive: process ids are reused."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "created": psutil.Process().create_time()}


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


def _parse(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ShardwiseError(
            f"{path}, line {number} is damaged: {error}. Take the line out, or start the run over."
        ) from error
    if not isinstance(line, dict) or "kind" not in line or ("step" not in line and line["kind"] != "run"):
        raise ShardwiseError(f"{path}, line {number} has no kind and step; take the line out, or start the run over.")
    return line
