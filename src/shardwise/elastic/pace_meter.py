"""How fast a generation trains: what its first rank tells the launcher, which may let the job grow by it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

_NUM_SKIPPED = 2
"""Steps at the beginning of a generation that are not counted: they lay out memory, and record a program."""
_LEAST_STEPS = 8
_FIRST_SECONDS, _LONGEST_SECONDS = 5.0, 600.0
"""Of a window. Each is twice as long as the last one, so that a job of weeks sends few messages."""
_DEVIATION_OF_MEDIAN = 1.4826
"""Times the median absolute deviation, it is the standard deviation of a normal distribution."""
_ERROR_OF_MEDIAN = 1.2533
"""By so much the standard error of a median is greater than that of a mean (the root of pi/2)."""


@dataclass(frozen=True)
class MedianStep:
    """The median step, and its relative standard error."""

    step_seconds: float
    error: float


class PaceMeter:
    """Measures one window of steps after the other, by medians: a checkpoint or an evaluation between two steps is none
    of their time. Use it on one rank, with each step that counts."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._generation = -1
        self._num_skipped = 0
        self._durations: list[float] = []
        self._last = self._window_seconds = 0.0

    def step(self, generation: int) -> MedianStep | None:
        """A step was taken by the ranks of a generation. Returns their pace if a window has ended."""
        now = self._clock()
        if generation != self._generation:
            self._generation, self._num_skipped, self._window_seconds = generation, 0, _FIRST_SECONDS
            self._durations = []
        elif self._num_skipped < _NUM_SKIPPED:
            self._num_skipped += 1
        else:
            self._durations.append(now - self._last)
        self._last = now
        if len(self._durations) < _LEAST_STEPS or sum(self._durations) < self._window_seconds:
            return None
        durations, self._durations = self._durations, []
        self._window_seconds = min(2 * self._window_seconds, _LONGEST_SECONDS)
        return pace_of(durations)


def pace_of(durations: list[float]) -> MedianStep:
    """The pace of ranks that took so many seconds for each step."""
    median = statistics.median(durations)
    deviation = statistics.median(abs(one - median) for one in durations) * _DEVIATION_OF_MEDIAN
    error = _ERROR_OF_MEDIAN * deviation / math.sqrt(len(durations)) / median
    return MedianStep(median, error)
