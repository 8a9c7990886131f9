"""Predicted beside measured: how far apart they are, and what explains most of it. Pure.

[Note: what is compared] On processors actions take the time that the host sees, so a step is compared action by action,
by the two timelines: what is computed in each unit, and each action of the program; those of equal layers count as one.
With an accelerator the host runs ahead, and only how it spends its steps is known: computing, waiting along each axis,
for a disk, or between steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.system.telemetry.timeline import HOST, STAGES, UNITS, alike
from shardwise.system.units import format_seconds

TOLERANCE = 0.2
"""From which difference on it is said what explains it."""
MANY = 10
"""From how many times as long on a share is not said in percent."""
DISK = "waiting for the disk"
BETWEEN = "between steps (data, logging, saving)"
REST = "outside of the model's units and messages (loss, optimizer, the loop)"
Seconds = Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """Of a step, in seconds. `what` explains most of it, by `by_seconds`; empty if nothing is known."""

    predicted: float
    measured: float
    hardware: str
    what: str = ""
    by_seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.measured / self.predicted - 1

    @property
    def is_large(self) -> bool:
        return abs(self.share) > TOLERANCE

    def __str__(self) -> str:
        """Such as `1.3 s a step, 1.0 s predicted on l40s: +30 %, mostly backward h.* (+210 ms)`."""
        text = f"{format_seconds(self.measured)} a step, {format_seconds(self.predicted)} predicted on {self.hardware}"
        if not self.is_large:
            return text
        times = self.measured / self.predicted
        text += f": {self.share:+.0%}" if times < MANY else f": {times:.0f} times as long"
        sign = "+" if self.by_seconds > 0 else "-"
        return f"{text}, mostly {self.what} ({sign}{format_seconds(abs(self.by_seconds))})" if self.what else text


def seconds_by_action(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of one rank's timeline: what its host spends on each unit's computation and each action, in seconds. Digits of
    names become `*`. Where spans overlap, the one that began last counts."""
    points: list[tuple[float, int, int, str]] = []
    for number, event in enumerate(events):
        if event.get("cat") not in (HOST, UNITS, STAGES):
            continue
        begin = float(event["ts"])
        if event["ph"] == "X":
            points += [(begin, 1, number, event["name"]), (begin + float(event["dur"]), 0, number, event["name"])]
        elif event["ph"] in "be":
            points.append((begin, int(event["ph"] == "b"), number, event["name"]))
    points.sort()
    found: defaultdict[str, float] = defaultdict(float)
    running: list[str] = []
    reached = 0.0
    for at, begins, _, name in points:
        if running:
            found[alike(running[-1])] += (at - reached) / 1e6
        reached = at
        if begins:
            running.append(name)
        elif name in running:
            running.remove(name)
    return dict(found)


def compared(
    line: Mapping[str, Any], measured: float, row: Mapping[str, Any], actions: Seconds | None = None
) -> Difference | None:
    """`line` is the record's about the prediction, `row` how a rank spends its steps, and `actions` are those of its
    timeline, if they are to be compared: see [Note: what is compared]. `None` for a line of another kind."""
    predicted = line.get("seconds")
    if not isinstance(predicted, int | float) or predicted <= 0 or measured <= 0:
        return None
    idle = float(row.get("idle", 0.0))
    found = Difference(predicted, measured, str(line.get("hardware", "")))
    if actions:
        theirs = {name: seconds for name, seconds in _seconds(line.get("actions")).items() if name in actions}
        changes = {name: seconds - theirs.get(name, 0.0) for name, seconds in actions.items()}
        rest = measured - idle - sum(actions.values()) - (predicted - sum(theirs.values()))
        changes |= {REST: rest, BETWEEN: idle}
    elif row:
        parts = predicted_parts(line)
        spent = {"computing": float(row.get("computing", 0.0)), DISK: float(row.get("disk", 0.0)), BETWEEN: idle}
        for line_of_ranks, seconds in _seconds(row.get("waited")).items():
            axis = line_of_ranks.partition(":")[0]  # two stages of a pipeline are `pp:0>1`
            spent[along(axis)] = spent.get(along(axis), 0.0) + seconds
        changes = {name: spent.get(name, 0.0) - parts.get(name, 0.0) for name in {**spent, **parts}}
    else:
        return found
    direction = 1 if measured > predicted else -1
    what = max(changes, key=lambda name: direction * changes[name])
    if direction * changes[what] <= 0:
        return found
    return Difference(found.predicted, found.measured, found.hardware, what, changes[what])


def predicted_parts(line: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by what the computation does or waits for, by the names of what ranks measure."""
    parts = _seconds(line.get("parts"))
    again = parts.pop("recomputing", 0.0)
    return parts | {"computing": parts.get("computing", 0.0) + again}


def along(axis: str) -> str:
    return f"waiting along {axis}"


def _seconds(values: object) -> dict[str, float]:
    """The numbers of a line that may be damaged."""
    given = values if isinstance(values, Mapping) else {}
    return {str(name): float(one) for name, one in given.items() if isinstance(one, int | float)}


def first_rank(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those of rank 0, of a trace of several."""
    return [event for event in events if event.get("pid") == 0 and "cat" in event]
