"""How busy others kept the machine while a run took place: all busy time of all cores, less that of the run."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import psutil

BUSY_CORES = 0.15
"""More than this in use by others while a run takes place, and its times are theirs too."""

LOOKING_SECONDS = 2.0

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


def look() -> float:
    """Cores that others use now; takes `LOOKING_SECONDS`."""
    neighbours = Neighbours()
    time.sleep(LOOKING_SECONDS)
    return neighbours.cores()


class Patience:
    """Seconds that may be spent on waiting until others leave the machine, and on running again what they disturbed."""

    def __init__(self, seconds: float, look: Callable[[], float] = look) -> None:
        self._left = seconds
        self._look = look

    def wait_for_calm(self) -> None:
        """Return when others are quiet, or patience is at its end."""
        while self._left > 0 and self._look() > BUSY_CORES:
            self._left -= LOOKING_SECONDS

    def allows_another(self, run_seconds: float) -> bool:
        """Whether a disturbed run of this length may be thrown away and done again."""
        self._left -= run_seconds
        return self._left > 0
