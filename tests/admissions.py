"""A recorded admission trace: what other jobs of a cluster leave to one that takes what is free, and gives it back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardwise.launch.elastic.scaling import Asking

DAY_SECONDS = 86_400
_FILE = Path(__file__).parent / "fixtures" / "admissions" / "one-day.txt"


def one_day() -> list[tuple[float, int]]:
    """Seconds, and how many GPUs are free from then on: multiples of 4, from 4 to 32."""
    lines = _FILE.read_text().splitlines()
    words = (line.split() for line in lines if not line.startswith("#"))
    return [(float(second), int(slots)) for second, slots in words]


def slots_at(trace: Sequence[tuple[float, int]], now: float) -> int:
    """How many are free at a time."""
    return [slots for _, slots in takewhile(lambda entry: entry[0] <= now, trace)][-1]


def training(size: int, step: int) -> Any:
    """What `Scaling` looks at of a job in which `size` ranks train, and have taken so many steps."""
    still = {"state": "formed", "is_ending": False, "needs_all": False, "axes": {}, "fitting": 0}
    return SimpleNamespace(**still, members=range(size), step=step)


class AtOnce(Asking):
    """Asks a place in the thread of the test."""

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        self.place.ask(num_slots, hosts)
