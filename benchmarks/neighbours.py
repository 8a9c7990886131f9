"""How busy others kept the machine while a run took place: all busy time of all cores, less that of the run."""

from __future__ import annotations

import resource
import time

import psutil

BUSY_CORES = 0.15
"""More than this in use by others while a run takes place, and its times are theirs too."""


class Neighbours:
    """Between two moments: cores that others used, on average. Time that a hypervisor took away counts as theirs.

    What the run used is known once its processes have been waited for, by those who started them.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy_at_start, self._own_at_start = _busy_seconds(), _children_seconds()

    def cores(self) -> float:
        seconds = time.monotonic() - self._start
        busy, own = _busy_seconds() - self._busy_at_start, _children_seconds() - self._own_at_start
        return round(max(0.0, busy - own) / max(seconds, 1e-9), 2)


class Patience:
    """Seconds that may be spent on waiting until others leave the machine, and on running again what they disturbed."""

    def __init__(self, seconds: float, looking_seconds: float = 2.0) -> None:
        self._left = seconds
        self._looking_seconds = looking_seconds

    def wait_for_calm(self) -> None:
        """Return when others are quiet, or patience is at its end."""
        while self._left > 0:
            neighbours = Neighbours()
            time.sleep(self._looking_seconds)
            if neighbours.cores() <= BUSY_CORES:
                return
            self._left -= self._looking_seconds

    def allows_another(self, run_seconds: float) -> bool:
        """Whether a disturbed run of this length may be thrown away and done again."""
        self._left -= run_seconds
        return self._left > 0


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # are in user and nice already
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - guests)


def _children_seconds() -> float:
    """CPU time of all descendants that have ended and been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
