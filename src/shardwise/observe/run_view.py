"""The state of a run according to its files: how far it is, whether it is alive, which rank is slow."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from shardwise.errors import ShardwiseError
from shardwise.observe.differences import Difference, compared, first_rank, seconds_by_action
from shardwise.observe.lines import Line, showable
from shardwise.observe.record import RecordReader, pid_namespace
from shardwise.observe.run_files import RECORD
from shardwise.observe.run_notes import Note, read_notes
from shardwise.observe.slowness import Verdict, judge
from shardwise.system.units import format_seconds

SILENT_SECONDS = 60.0
"""A process on another host cannot be checked; after this long, and ten steps, without a line it is called silent."""
NUM_PACE = 20
_MOST_FOLDERS, _MOST_FOUND = 2000, 5
"""In how many folders runs are looked for if there is none where it should be, and how many are named."""
Status = Literal["running", "ended", "failed", "crashed", "silent"]


@dataclass
class RunView:
    """A run according to its files. `now` is when they were read, in seconds since the epoch."""

    folder: Path
    header: Line
    lines: list[Line]
    notes: list[Note]
    now: float
    host: str = field(default_factory=socket.gethostname)
    num_damaged: int = 0
    """Lines of the record that could not be read."""

    @property
    def last_start(self) -> Line:
        """The header of the process that wrote last: of the run, or of its latest resume."""
        return self.latest("resume") or self.header

    @property
    def lines_of_start(self) -> list[Line]:
        """The lines written since that header."""
        places = [place for place, line in enumerate(self.lines) if line["kind"] == "resume"]
        return self.lines[places[-1] + 1 :] if places else self.lines

    def latest(self, kind: str) -> Line | None:
        return _last_of(self.lines, kind)

    @cached_property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "step"]

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.last_start.get("mesh") or self.header.get("mesh") or {})

    @property
    def made_of(self) -> str:
        """The preset, and the mesh or the number of ranks, as far as the record has them: `zero3 on dp=4`."""
        start = self.last_start
        mesh, size = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items()), start.get("world_size", 0)
        where = mesh or (f"{size} rank{'s' * (size != 1)}" if size else "")
        return " on ".join(str(word) for word in (start.get("plan", {}).get("preset"), where) if word)

    @property
    def damage(self) -> str:
        """A sentence about lines that could not be read; empty if there are none."""
        if not self.num_damaged:
            return ""
        are = "One line of the record is" if self.num_damaged == 1 else f"{self.num_damaged} lines of the record are"
        return f"{are} damaged, or of another version, and left out."

    @property
    def end(self) -> Line | None:
        """The `end` line of the process that wrote last, if there is one."""
        return _last_of(self.lines_of_start, "end")

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last line with a time."""
        told = next((line["time"] for line in reversed(self.lines_of_start) if "time" in line), self.now)
        return max(0.0, self.now - told)

    @property
    def status(self) -> Status:
        if self.end is not None:
            return "failed" if self.end.get("status") == "failed" else "ended"
        lives = self._process_lives()
        if lives is None:
            waits = max(SILENT_SECONDS, 10 * self.seconds_per_step)
            return "silent" if self.silent_seconds > waits else "running"
        return "running" if lives else "crashed"

    def _process_lives(self) -> bool | None:
        """Whether the process of rank 0 exists; `None` if it is on another host or in another container."""
        process = self.last_start.get("process", {})
        space = pid_namespace()
        if process.get("host") != self.host or process.get("pid_namespace", space) != space:
            return None
        try:
            found = psutil.Process(int(process["pid"]))
            is_it = abs(found.create_time() - float(process["created"])) < 1.0
            return is_it and found.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, KeyError, ValueError, TypeError, OverflowError):
            return False

    @property
    def status_text(self) -> str:
        """The status as a sentence."""
        silent = format_seconds(self.silent_seconds)
        step = self.steps[-1]["step"] if self.steps else 0
        if self.status == "running":
            late = self.seconds_per_step and self.silent_seconds > max(10.0, 10 * self.seconds_per_step)
            return f"running, but no step for {silent}" if late else "running"
        if self.status == "ended":
            return f"ended after step {step}"
        if self.status == "failed":
            return f"failed after step {step}: {self.end.get('error', '') if self.end else ''}"
        if self.status == "silent":
            where = "on another host or in another container"
            return f"silent for {silent}, after step {step}; rank 0 is {where}"
        return f"crashed after step {step}: the process of rank 0 is gone and left no word"

    @cached_property
    def _latest_steps(self) -> list[Line]:
        """Those that tell the run's pace. The first since a start rehearses, compiles and takes memory from the system,
        which no later one does: it counts only where there is no other."""
        found, num_since_start = [], 0
        for line in self.lines:
            if line["kind"] == "resume":
                num_since_start = 0
            elif line["kind"] == "step":
                num_since_start += 1
                if num_since_start > 1:
                    found.append(line)
        return (found or self.steps)[-NUM_PACE:]

    @property
    def seconds_per_step(self) -> float:
        seconds = [line["seconds"] for line in self._latest_steps if line.get("seconds", 0) > 0]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def throughput(self) -> tuple[float, str] | None:
        """The rate over the last few steps, and its unit: tokens, else samples, else steps."""
        recent = self._latest_steps
        for unit in ("tokens", "samples"):
            found = [line for line in recent if line.get(f"{unit}_per_second") and line.get("seconds", 0) > 0]
            if found:
                seconds = sum(line["seconds"] for line in found)
                return sum(line[f"{unit}_per_second"] * line["seconds"] for line in found) / seconds, unit
        return (1 / self.seconds_per_step, "steps") if self.seconds_per_step else None

    def ranks(self) -> list[dict[str, Any]]:
        """How each rank spent its latest steps, by rank; empty if not recorded since the last start."""
        return self._latest_of_start("ranks")

    def verdicts(self) -> list[Verdict]:
        rows = self.ranks()
        return judge(rows, self.mesh) if rows else []

    def stragglers(self) -> list[dict[str, Any]]:
        """What slow ranks, links and stages have cost of the latest steps, `words`, `seconds` and `share` of each."""
        return self._latest_of_start("stragglers", "found")

    @property
    def prediction(self) -> Line | None:
        """The line about the predicted step, since the last start."""
        return _last_of(self.lines_of_start, "predicted")

    def difference(self, timeline: Sequence[Mapping[str, Any]] = ()) -> Difference | None:
        """How far the latest steps are from the prediction, if there is one. `timeline` are events of a trace of this
        run, of any ranks."""
        line = self.prediction
        if line is None:
            return None
        on_host = self.last_start.get("device") == "cpu"
        actions = seconds_by_action(first_rank(timeline)) if on_host else None
        return compared(line, self.seconds_per_step, next(iter(self.ranks()), {}), actions)

    def memory(self) -> list[dict[str, Any]]:
        """Bytes promised, measured and if replicated, by tier and kind, for each rank."""
        return self._latest_of_start("memory")

    def _latest_of_start(self, kind: str, name: str = "ranks") -> list[dict[str, Any]]:
        """Rows, by rank if nothing else is asked for. Those from before the last start may be of ranks that are
        gone."""
        line = _last_of(self.lines_of_start, kind)
        return list(line[name]) if line is not None else []


def _last_of(lines: Sequence[Line], kind: str) -> Line | None:
    return next((line for line in reversed(lines) if line["kind"] == kind), None)


class RunReader:
    """Reads a run any number of times; of its record each time only what was added."""

    def __init__(self, run: str | Path) -> None:
        """The run in a folder, or that of a record."""
        self._run = Path(run)
        self._record: RecordReader | None = None

    def read(self) -> RunView:
        """What the files say now. Raises `ShardwiseError` if there is no record."""
        path = self._path()
        if self._record is None:
            self._record = RecordReader(path, keep=showable, follows_links=path == self._run)
        record = self._record.read()
        header, notes = showable(record.header) or record.header, read_notes(path.parent)
        return RunView(path.parent, header, record.lines, notes, time.time(), num_damaged=record.num_damaged)

    def _path(self) -> Path:
        try:
            is_folder = self._run.is_dir()
            path = self._run / RECORD if is_folder else self._run
            if path.exists():
                return path
        except (OSError, ValueError) as error:  # ValueError: a NUL in the name
            raise ShardwiseError(f"The run {self._run} cannot be read: {error}.") from error
        found = list(itertools.islice(_runs_below(self._run), _MOST_FOUND)) if is_folder else []
        below = f" There are runs in {', '.join(found)}." if found else " Give the folder that the plan has as run."
        raise ShardwiseError(f"There is no run in {self._run}: it has no {RECORD}.{below}")


def _runs_below(folder: Path) -> Iterator[str]:
    """Folders with a record. Only some are looked at: `folder` may be the root of a disk."""
    for here, folders, files in itertools.islice(os.walk(folder), _MOST_FOLDERS):
        folders.sort()
        if RECORD in files:
            yield here


def read_run(run: str | Path) -> RunView:
    """Read the run in a folder, or that of a record. Raises `ShardwiseError` if there is no record."""
    return RunReader(run).read()


def as_json(view: RunView) -> str:
    """The state of a run as JSON, for programs."""
    rate, difference = view.throughput(), view.difference()
    last = view.steps[-1] if view.steps else {}
    state = {
        "status": view.status,
        "status_text": view.status_text,
        "step": last.get("step", 0),
        "loss": last.get("loss"),
        "throughput": None if rate is None else {"per_second": rate[0], "of": rate[1]},
        "predicted": None
        if difference is None
        else {"seconds": difference.predicted, "measured_seconds": difference.measured, "words": str(difference)},
        "ranks": [
            {**row, "slow": verdict.is_slow, "why": verdict.words}
            for row, verdict in zip(view.ranks(), view.verdicts(), strict=True)
        ],
        "stragglers": view.stragglers(),
        "memory": view.memory(),
        "notes": [note.__dict__ for note in view.notes],
    }
    return json.dumps(state, indent=2)


class MostBytes(NamedTuple):
    """Of what is of one `kind` on a `tier`: the most that was promised of any rank, and that was measured."""

    tier: str
    kind: str
    promised: int
    measured: int


def most_of_all_ranks(rows: Sequence[Mapping[str, Any]]) -> list[MostBytes]:
    """By tier and kind, those of which there is something."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for place, name in enumerate(("promised", "measured")):
            for tier, kinds in row.get(name, {}).items():
                for kind, num_bytes in kinds.items():
                    both = found.setdefault((tier, kind), [0, 0])
                    both[place] = max(both[place], num_bytes)
    return [MostBytes(tier, kind, *both) for (tier, kind), both in found.items() if any(both)]


def bytes_by_tier(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """The bytes measured on each tier, by rank, without empty tiers."""
    sums = [{tier: sum(kinds.values()) for tier, kinds in row.get("measured", {}).items()} for row in rows]
    return [{tier: num_bytes for tier, num_bytes in one.items() if num_bytes} for one in sums]
