"""The state of a run according to its files: how far it is, whether it is alive, which rank is slow."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from shardwise.errors import ShardwiseError
from shardwise.monitor.notes import Note, read_notes
from shardwise.monitor.record import Line, read_record
from shardwise.monitor.slowness import Verdict, judge

RECORD = "record.jsonl"
SILENT_SECONDS = 60.0
"""A process on another host cannot be checked; after this long, and ten steps, without a line it is called silent."""
NUM_PACE = 20
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

    @property
    def last_start(self) -> Line:
        """The header of the process that wrote last: of the run, or of its latest resume."""
        return next((line for line in reversed(self.lines) if line["kind"] == "resume"), self.header)

    @property
    def lines_of_start(self) -> list[Line]:
        """The lines written since that header."""
        places = [place for place, line in enumerate(self.lines) if line["kind"] == "resume"]
        return self.lines[places[-1] + 1 :] if places else self.lines

    def latest(self, kind: str) -> Line | None:
        return next((line for line in reversed(self.lines) if line["kind"] == kind), None)

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "step"]

    @property
    def mesh(self) -> dict[str, int]:
        return dict(self.last_start.get("mesh") or self.header.get("mesh") or {})

    @property
    def end(self) -> Line | None:
        """The `end` line of the process that wrote last, if there is one."""
        return next((line for line in self.lines_of_start if line["kind"] == "end"), None)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last line with a time."""
        told = [line["time"] for line in self.lines_of_start if isinstance(line.get("time"), int | float)]
        return max(0.0, self.now - told[-1]) if told else 0.0

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
        """Whether the process of rank 0 exists; `None` if it is on another host."""
        process = self.last_start.get("process")
        if not isinstance(process, dict) or process.get("host") != self.host:
            return None
        try:
            return abs(psutil.Process(int(process["pid"])).create_time() - float(process["created"])) < 1.0
        except (psutil.Error, KeyError, ValueError, TypeError):
            return False

    @property
    def said(self) -> str:
        """The status as a sentence."""
        step = self.steps[-1]["step"] if self.steps else 0
        if self.status == "running":
            late = self.seconds_per_step and self.silent_seconds > max(10.0, 10 * self.seconds_per_step)
            return f"running, but no step for {self.silent_seconds:.0f} s" if late else "running"
        if self.status == "ended":
            return f"ended after step {step}"
        if self.status == "failed":
            return f"failed after step {step}: {self.end['error'] if self.end else ''}"
        if self.status == "silent":
            return f"silent for {self.silent_seconds:.0f} s, after step {step}; rank 0 is on another host"
        return f"crashed after step {step}: the process of rank 0 is gone and left no word"

    @property
    def seconds_per_step(self) -> float:
        seconds = [line["seconds"] for line in self.steps[-NUM_PACE:] if line.get("seconds")]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def throughput(self) -> tuple[float, str] | None:
        """The rate over the last few steps, and its unit: tokens, else samples, else steps."""
        recent = self.steps[-NUM_PACE:]
        for unit in ("tokens", "samples"):
            found = [line for line in recent if line.get(f"{unit}_per_second") and line.get("seconds")]
            if found:
                seconds = sum(line["seconds"] for line in found)
                return sum(line[f"{unit}_per_second"] * line["seconds"] for line in found) / seconds, unit
        return (1 / self.seconds_per_step, "steps") if self.seconds_per_step else None

    def ranks(self) -> list[dict[str, Any]]:
        """How each rank spent its latest steps, by rank; empty if not recorded."""
        line = self.latest("ranks")
        return list(line["ranks"]) if line is not None else []

    def verdicts(self) -> list[Verdict]:
        rows = self.ranks()
        return judge(rows, self.mesh) if rows else []

    def memory(self) -> list[dict[str, Any]]:
        """Bytes promised, measured and if replicated, by tier and kind, for each rank."""
        line = self.latest("memory")
        return list(line["ranks"]) if line is not None else []


def read_run(run: str | Path) -> RunView:
    """Read the run in a folder, or that of a record. Raises `ShardwiseError` if there is no record."""
    path = Path(run)
    path = path / RECORD if path.is_dir() else path
    if not path.exists():
        found = sorted(str(one.parent) for one in Path(run).glob(f"**/{RECORD}"))[:5] if Path(run).is_dir() else []
        below = f" There are runs in {', '.join(found)}." if found else " Give the folder that the plan has as run."
        raise ShardwiseError(f"There is no run in {run}: it has no {RECORD}.{below}")
    record = read_record(path)
    return RunView(path.parent, record.header, record.lines, read_notes(path.parent), time.time())


def as_json(view: RunView) -> str:
    """The state of a run as JSON, for programs."""
    rate = view.throughput()
    last = view.steps[-1] if view.steps else {}
    state = {
        "status": view.status,
        "said": view.said,
        "step": last.get("step", 0),
        "loss": last.get("loss"),
        "throughput": None if rate is None else {"per_second": rate[0], "of": rate[1]},
        "ranks": [
            {**row, "slow": verdict.is_slow, "why": verdict.words}
            for row, verdict in zip(view.ranks(), view.verdicts(), strict=True)
        ],
        "memory": view.memory(),
        "notes": [note.__dict__ for note in view.notes],
    }
    return json.dumps(state, indent=2)


def most_of_all_ranks(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int, int]]:
    """`(tier, kind, promised, measured)`, each the maximum over all ranks, without empty rows."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        for place, name in enumerate(("promised", "measured")):
            for tier, kinds in row.get(name, {}).items():
                for kind, num_bytes in kinds.items():
                    both = found.setdefault((tier, kind), [0, 0])
                    both[place] = max(both[place], num_bytes)
    return [(tier, kind, both[0], both[1]) for (tier, kind), both in found.items() if any(both)]
