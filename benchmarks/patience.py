"""Patience with others that keep the machine busy while a run takes place."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwise.system.neighbours import BUSY_CORES, Neighbours

LOOKING_SECONDS = 2.0


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
