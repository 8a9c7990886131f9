"""Which rank is slow, why, and who waits for it, from how each rank spent its steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SLOW = 1.1
"""A rank is slow if it is busy for this many times the median."""
MUCH_WAITING = 0.1
"""The share of a step from which waiting is reported."""
MOSTLY = 0.5
"""The share of a step from which it is said that a disk determines its time."""
_WORK = {
    "computing": "computes",
    "disk": "waits for its disk",
    "idle": "is between steps (data, logging, saving)",
}
"""What makes a rank late, in words."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one rank: whether the others wait for it, and a short description of what it does."""

    rank: int
    is_slow: bool
    words: str


def judge(rows: Sequence[Mapping[str, Any]], mesh: Mapping[str, int], factor: float = SLOW) -> list[Verdict]:
    """One verdict per rank, from the rows of a `ranks` line and the axes of the mesh with their sizes, outermost first.

    Early ranks wait for late ones, so the slow rank is the one that waits least for others: it is busy for longer than
    the median, with its model, its disk or what happens between steps (data, logging, checkpoints). The wait that even
    the slowest rank has is the communication itself. A rank is slow if it is busy for more than `factor` times the
    median.
    """
    busy = [sum(row.get(name, 0.0) for name in _WORK) for row in rows]
    median = statistics.median(busy)
    late = {rank for rank, seconds in enumerate(busy) if len(rows) > 1 and seconds > factor * max(median, 1e-9)}
    if len(rows) == 2 and not late and max(busy) > factor * min(busy):
        late = {busy.index(max(busy))}
    return [
        Verdict(rank, rank in late, _reason(rank, rows) if rank in late else _waits(rank, rows, busy, mesh))
        for rank in range(len(rows))
    ]


def chosen(verdicts: Sequence[Verdict], most: int) -> list[Verdict]:
    """At most `most` of them, by rank: the slow ones first, then the lowest ranks."""
    first = sorted(verdicts, key=lambda one: (not one.is_slow, one.rank))[:most]
    return sorted(first, key=lambda one: one.rank)


def others(verdicts: Sequence[Verdict], shown: Sequence[Verdict]) -> str:
    """A few words on those that are not shown."""
    num_slow = sum(one.is_slow for one in verdicts) - sum(one.is_slow for one in shown)
    slow = f"{num_slow} of them slow" if num_slow else "none of them slow"
    return f"and {len(verdicts) - len(shown)} more, {slow}"


@dataclass(frozen=True)
class Finding:
    """What was slow over a window: a rank, or if `rank` is None the links along an axis, or the disks."""

    rank: int | None
    words: str


class SlowWindow:
    """Finds slow ranks while a job runs: over at least `seconds`, by at least `factor`. Says once if steps mostly wait
    for disks.

    All ranks get the same input, so all find the same without communication. Ranks with more samples than others may
    take longer in proportion.
    """

    def __init__(self, factor: float, seconds: float, mesh: Mapping[str, int]) -> None:
        self._factor = factor
        self._seconds = seconds
        self._mesh = dict(mesh)
        self._rows: list[dict[str, Any]] = []
        self._num_steps = 0
        self._least_waited: dict[str, float] = {}
        self._has_named_disks = False

    def add(self, rows: Sequence[Mapping[str, Any]], weights: Sequence[float], num_steps: int) -> list[Finding]:
        """Add how each rank has spent the last `num_steps`, in seconds: `seconds`, `computing`, `idle`, `disk`,
        `waited` by axis. Returns the findings if a window ends here."""
        if len(rows) != len(self._rows):
            self._begin(len(rows))
        self._num_steps += num_steps
        for mine, row, weight in zip(self._rows, rows, weights, strict=True):
            mine["seconds"] += row["seconds"]
            mine["computing"] += row["computing"] / weight if weight else 0.0
            mine["idle"] += row["idle"]
            mine["disk"] += row.get("disk", 0.0)
            for axis, waited in row["waited"].items():
                mine["waited"][axis] = mine["waited"].get(axis, 0.0) + waited
        if not self._rows or self._rows[0]["seconds"] < self._seconds:
            return []
        steps, rows = max(1, self._num_steps), [_each(row, self._num_steps) for row in self._rows]
        self._begin(len(rows))
        found = [
            Finding(verdict.rank, f"rank {verdict.rank} is {verdict.words}, over {steps} steps")
            for verdict in judge(rows, self._mesh, self._factor)
            if verdict.is_slow
        ]
        return [*(found or self._slow_links(rows)), *self._slow_disks(rows)]

    def _begin(self, num_ranks: int) -> None:
        self._rows = [
            {"seconds": 0.0, "computing": 0.0, "idle": 0.0, "disk": 0.0, "waited": {}} for _ in range(num_ranks)
        ]
        self._num_steps = 0

    def _slow_links(self, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
        """Axes on which even the rank that waits least waits for longer than in the best window so far."""
        found = []
        for axis in sorted({axis for row in rows for axis in row["waited"]}):
            waited = min(row["waited"].get(axis, 0.0) for row in rows)
            least = self._least_waited.get(axis, waited)
            if waited > self._factor * least and waited - least > MUCH_WAITING * rows[0]["seconds"]:
                times = f"{waited / least:.1f} times as long as before" if least > 0 else "and took nothing before"
                found.append(Finding(None, f"messages along {axis} take {waited * 1e3:.0f} ms of a step, {times}"))
            self._least_waited[axis] = min(least, waited)
        return found

    def _slow_disks(self, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
        """Whether most of a step is waiting for disks, on whichever rank waits longest for its own."""
        slowest = max(range(len(rows)), key=lambda rank: rows[rank]["disk"])
        row = rows[slowest]
        if self._has_named_disks or row["disk"] < MOSTLY * row["seconds"]:
            return []
        self._has_named_disks = True
        share = row["disk"] / row["seconds"]
        what = f"rank {slowest} waits for its disk {share:.0%} of a step ({row['disk']:.3g} of {row['seconds']:.3g} s)"
        return [Finding(None, f"{what}: shardwise bench disk FOLDER measures what that disk can do")]


def _each(row: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """The means per step."""
    steps = max(1, num_steps)
    waited = {axis: seconds / steps for axis, seconds in row["waited"].items()}
    one = {name: row[name] / steps for name in ("seconds", "computing", "idle", "disk")}
    return {**one, "waited": waited, "waiting": sum(waited.values())}


def _reason(rank: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """For a slow rank: the activity in which it differs most from the others."""
    row = rows[rank]
    others = [other for number, other in enumerate(rows) if number != rank]
    own = {name: row.get(name, 0.0) for name in _WORK}
    usual = {name: statistics.median(other.get(name, 0.0) for other in others) for name in _WORK}
    name = max(_WORK, key=lambda one: own[one] - usual[one])
    is_usual = usual[name] > 0.01 * row["seconds"]
    times = f" {own[name] / usual[name]:.1f} times as long as others" if is_usual else ", which others hardly do"
    return f"slow: {_WORK[name]}{times}"


def _waits(rank: int, rows: Sequence[Mapping[str, Any]], busy: Sequence[float], mesh: Mapping[str, int]) -> str:
    row = rows[rank]
    share = row["waiting"] / row["seconds"] if row["seconds"] > 0 else 0.0
    on_disk = row.get("disk", 0.0)
    if on_disk > max(row["waiting"], MUCH_WAITING * row["seconds"]):
        return f"waits {on_disk / row['seconds']:.0%} of a step for its disk"
    if share < MUCH_WAITING or not row["waited"]:
        return "computes" if row["computing"] >= row["idle"] else "between steps (data, logging, saving)"
    axis = max(row["waited"], key=lambda one: row["waited"][one])
    group = _along(rank, axis, mesh, len(rows))
    slowest = max(group, key=lambda one: busy[one])
    along = f" along {axis}" if axis in mesh else ""
    if slowest == rank or busy[slowest] < SLOW * busy[rank]:
        return f"waits {share:.0%} of a step for messages{along}"
    return f"waits {share:.0%} of a step for rank {slowest}{along}"


def _along(rank: int, axis: str, mesh: Mapping[str, int], num_ranks: int) -> list[int]:
    """The ranks on the line along `axis` through `rank`; all ranks for an axis outside of the mesh."""
    sizes = list(mesh.values())
    if axis not in mesh or math.prod(sizes) != num_ranks:
        return list(range(num_ranks))
    stride = math.prod(sizes[list(mesh).index(axis) + 1 :])
    first = rank - rank // stride % mesh[axis] * stride
    return list(range(first, first + mesh[axis] * stride, stride))
