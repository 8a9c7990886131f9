"""How busy others keep this machine: all busy time of all cores, less that of this process and its children."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import psutil

BUSY_CORES = 0.15
"""More than this in use by others while something is timed, and its times are theirs too."""

Seconds = Callable[[], float]


def busy_seconds() -> float:
    """What all cores have worked since the machine started. Time that a hypervisor took away counts as work."""
    times = psutil.cpu_times()
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # are in user and nice already
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - guests)


def own_seconds() -> float:
    """CPU time of this process, and of all descendants that have ended and been waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Neighbours:
    """Cores that others used, on average, from when this is made until it is asked.

    Asked when the run's processes have ended: what they used is known once they have been waited for.
    """

    def __init__(
        self, busy: Seconds = busy_seconds, own: Seconds = own_seconds, clock: Seconds = time.monotonic
    ) -> None:
        self._busy, self._own, self._clock = busy, own, clock
        self._start, self._busy_at_start, self._own_at_start = clock(), busy(), own()

    def cores(self) -> float:
        seconds = max(self._clock() - self._start, 1e-9)
        others = (self._busy() - self._busy_at_start) - (self._own() - self._own_at_start)
        return round(max(0.0, others) / seconds, 2)
