"""Events of ranks in time, in the format of chrome://tracing and ui.perfetto.dev.

The format is Google's "Trace Event Format". Each rank is a process there, and its tracks are threads. Concurrent work
(a unit's backward, a message in flight) is an asynchronous span; sequential work of the host is a plain span. A
pipeline adds the ops of its schedule (`F0`, `B0`), and their waits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

HOST, UNITS, ON_THE_WAY, STAGES = "host", "units", "on the way", "stages"
TRACKS = (UNITS, HOST, ON_THE_WAY, STAGES)

Event = dict[str, Any]
_OFF = nullcontext()
_NUMBER = re.compile(r"(?<![^\W\d_])\d+")


def alike(name: str) -> str:
    """A name in which numbers are `*`, the same for equal layers."""
    return _NUMBER.sub("*", name)


class Timeline:
    """Records events while `is_on`. Times are microseconds of the wall clock, so that ranks of one machine share
    them."""

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
        """End open spans, and return all events."""
        for track, name in sorted(self._open):
            self.end(track, name)
        self.is_on = False
        return self.events

    def during(self, track: str, name: str) -> AbstractContextManager[None]:
        """A context during which `name` is running; costs next to nothing while recording is off."""
        return self._during(track, name) if self.is_on else _OFF

    @contextmanager
    def _during(self, track: str, name: str) -> Iterator[None]:
        self.begin(track, name)
        try:
            yield
        finally:
            self.end(track, name)

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """A context that records a span of the host."""
        start = self._now()
        try:
            yield
        finally:
            self.events.append(
                {"ph": "X", "cat": HOST, "name": name, "ts": start, "dur": self._now() - start, "args": args}
            )

    def begin(self, track: str, name: str, **args: object) -> None:
        """Begin the span `name`. A second begin before its end is ignored."""
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
    """The share of the time with messages in flight in which the host works; 1 if there are no messages."""
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
    """The total length of spans, counting overlaps once."""
    length, reached = 0.0, float("-inf")
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return length


def trace_of(ranks: Iterable[list[Event]]) -> list[Event]:
    """The events of all `ranks`, in their order, with the names of ranks and tracks."""
    events: list[Event] = []
    for rank, own in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, track in enumerate(TRACKS):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": track}})
        events += [{**event, "pid": rank, "tid": TRACKS.index(event["cat"])} for event in own]
    return events


def write_trace(path: Path, ranks: Iterable[list[Event]]) -> None:
    """Write one file with the events of all `ranks`, in their order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"traceEvents": trace_of(ranks), "displayTimeUnit": "ms"}))
