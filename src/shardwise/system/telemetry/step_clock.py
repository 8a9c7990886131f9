"""How a host spends its time: computing, waiting for other ranks or for a disk, or idle between computations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOADER, BETWEEN, DISK = "its loader", "what lies between steps (data, logging, saving)", "waiting for its disk"
OTHER = "what lies outside of units and optimizer"
"""Places where a rank spends time of its own, beside those of a program (`program/places.py`)."""


@dataclass(frozen=True)
class Lap:
    """Seconds since the lap before. `waited` is by the axis of the ranks that were waited for, `disk` for the disk
    tier. `spent` is by place, of what is computed and of the loader, which is idle time."""

    seconds: float
    idle: float
    waited: dict[str, float]
    disk: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def waiting(self) -> float:
        return sum(self.waited.values())

    @property
    def computing(self) -> float:
        """The rest: forward, loss, backward and update, and work that overlaps with them."""
        return max(0.0, self.seconds - self.idle - self.waiting - self.disk)

    @property
    def by_place(self) -> dict[str, float]:
        """All seconds in which this rank did not wait for others, by place."""
        between = max(0.0, self.idle - self.spent.get(LOADER, 0.0))
        rest = {DISK: self.disk, BETWEEN: between}
        return {**self.spent, **{place: seconds for place, seconds in rest.items() if seconds > 0}}


class StepClock:
    """The clock of one rank, written by the thread that computes.

    Between a backward or an update and the next forward or update the rank counts as idle: it reads data, logs or
    saves. Waiting in between counts as waiting. With an accelerator these are times of the host, which runs ahead of
    the device.

    [Note: places] Every block of a program says what was computed before it (`reach`): two readings of a clock for
    each, about 0.3 us on a CPU, which is why it is always on.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        """In seconds, from any beginning. All of this rank's times of a step are read from it."""
        self._waited: defaultdict[str, float] = defaultdict(float)
        self._total_waited = 0.0
        self._disk = self._idle = 0.0
        self.is_on_disk = False
        """Whether this rank waits for a disk."""
        self.num_disk_waits = self.num_disk_calls = 0
        """How often it has waited for one; and reads and writes that are done, counted by the threads that do them:
        it grows as long as a disk works."""
        self._lap_began = self._resting_since = now()
        self._waited_at_rest = 0.0
        self._rests = True
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._reached = self._lap_began
        """When the last place was reached, by a clock that stands while this rank waits."""

    def wait(self, axis: str, seconds: float) -> None:
        """Count `seconds` of waiting for ranks along `axis`."""
        self._waited[axis] += seconds
        self._total_waited += seconds

    @contextmanager
    def waiting_for_disk(self) -> Iterator[None]:
        """Count the time inside as waiting for a disk."""
        started, self.is_on_disk = self.now(), True
        self.num_disk_waits += 1
        try:
            yield
        finally:
            seconds = self.now() - started
            self.is_on_disk = False
            self._disk += seconds
            self._total_waited += seconds

    def note_disk_call(self) -> None:
        """A read or write is done. Called from any thread."""
        self.num_disk_calls += 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count the time inside as the loader's, without waiting."""
        started, waited = self.now(), self._total_waited
        try:
            yield
        finally:
            self._spent[LOADER] += self.now() - started - (self._total_waited - waited)

    def work(self) -> None:
        """The model begins to compute."""
        if self._rests:
            self._count_rest()
            self._rests = False
            self._reached = self._resting_since - self._total_waited

    def reach(self, place: str) -> None:
        """What was computed since `work` or the last call, without waiting, counts as `place`. See [Note: places]."""
        if self._rests:
            return
        now = self.now() - self._total_waited
        self._spent[place] += now - self._reached
        self._reached = now

    def rest(self) -> None:
        """The model ends computing."""
        self.reach(OTHER)
        self._count_rest()
        self._rests = True

    def lap(self) -> Lap:
        """The times since the last call."""
        self.reach(OTHER)
        self._count_rest()
        now = self.now()
        lap = Lap(now - self._lap_began, self._idle, dict(self._waited), self._disk, dict(self._spent))
        self._lap_began, self._idle, self._disk = now, 0.0, 0.0
        self._waited.clear()
        self._spent.clear()
        return lap

    def _count_rest(self) -> None:
        now = self.now()
        if self._rests:
            self._idle += max(0.0, now - self._resting_since - (self._total_waited - self._waited_at_rest))
        self._resting_since, self._waited_at_rest = now, self._total_waited
