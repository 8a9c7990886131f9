"""What happened when: spans of one rank, in the form that chrome://tracing and ui.perfetto.dev read.

The form is Google's "Trace Event Format". A rank is a process there, and what it did are threads of it. What goes on
beside other things (a unit's backward, a message on its way) is an asynchronous span; what the host does, one thing
after the other, is a plain one. Of a pipeline there are the ops of the schedule (`F0`, `B0`), and what they wait for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOST, UNITS, ON_THE_WAY, STAGES = "host", "units", "on the way", "stages"
TRACKS = (UNITS, HOST, ON_THE_WAY, STAGES)

Event = dict[str, Any]


class Timeline:
    """Records while `is_on`. Times are microseconds of the wall clock, so that ranks of one machine share them."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[Event] = []
        self._offset_us = 0.0
        self._open: set[tuple[str, str]] = set()

    def start(self) -> None:
        self.events = []
        self._open.clear()
        self._offset_us = time.time_ns() / 1e3 - time.perf_counter_ns() / 1e3
        self.is_on = True

    def stop(self) -> list[Event]:
        """End what is still open, and hand over all events."""
        for track, name in sorted(self._open):
            self.end(track, name)
        self.is_on = False
        return self.events

    @contextmanager
    def during(self, track: str, name: str) -> Iterator[None]:
        """`name` goes on inside; costs next to nothing while this is off."""
        self.begin(track, name)
        try:
            yield
        finally:
            self.end(track, name)

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """What the host does inside."""
        start = self._now()
        try:
            yield
        finally:
            self.events.append(
                {"ph": "X", "cat": HOST, "name": name, "ts": start, "dur": self._now() - start, "args": args}
            )

    def begin(self, track: str, name: str, **args: object) -> None:
        """`name` goes on from here. Begun twice, it is one."""
        if self.is_on and (track, name) not in self._open:
            self._open.add((track, name))
            self.events.append({"ph": "b", "cat": track, "name": name, "id": name, "ts": self._now(), "args": args})

    def end(self, track: str, name: str) -> None:
        if self.is_on and (track, name) in self._open:
            self._open.remove((track, name))
            self.events.append({"ph": "e", "cat": track, "name": name, "id": name, "ts": self._now()})

    def _now(self) -> float:
        return time.perf_counter_ns() / 1e3 + self._offset_us


def hidden_share(events: Iterable[Event]) -> float:
    """Of the time in which something is on the way, the share in which the host does something; 1 if nothing is."""
    begun: dict[str, float] = {}
    travelling: list[tuple[float, float]] = []
    busy: list[tuple[float, float]] = []
    for event in events:
        if event["cat"] == HOST:
            busy.append((event["ts"], event["ts"] + event["dur"]))
        elif event["cat"] == ON_THE_WAY and event["ph"] == "b":
            begun[event["name"]] = event["ts"]
        elif event["cat"] == ON_THE_WAY:
            travelling.append((begun.pop(event["name"]), event["ts"]))
    whole, free = _length(travelling), _length([*travelling, *busy]) - _length(busy)
    return 1 - free / whole if whole else 1.0


def _length(spans: Iterable[tuple[float, float]]) -> float:
    """Of all together, where they overlap once."""
    length, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return length


def write_trace(path: Path, ranks: Iterable[list[Event]]) -> None:
    """One file with the events of all `ranks`, in their order."""
    events: list[Event] = []
    for rank, own in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, track in enumerate(TRACKS):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}})
        events += [{**event, "pid": rank, "tid": TRACKS.index(event["cat"])} for event in own]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
