"""How many replacements for dead processes may be started."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_SOON_SECONDS = 30
_LONGEST_PAUSE_SECONDS = 30


class Budget:
    """`retries` starts within any `seconds`."""

    def __init__(self, retries: int, seconds: float) -> None:
        self.retries = retries
        self.seconds = seconds
        self._starts: deque[float] = deque()
        self._born: dict[Hashable, float] = {}
        self._num_soon: dict[Hashable, int] = {}

    def ask(self, slot: Hashable, now: float) -> float | None:
        """When to start a replacement in `slot`; `None` if there were too many.

        Usually at once. If one process after the other dies soon after its start, the pauses grow.
        """
        while self._starts and self._starts[0] < now - self.seconds:
            self._starts.popleft()
        if len(self._starts) >= self.retries:
            return None
        is_soon = now - self._born.get(slot, -_SOON_SECONDS) < _SOON_SECONDS
        number = self._num_soon[slot] = self._num_soon.get(slot, 0) + 1 if is_soon else 0
        moment = now + (min(_LONGEST_PAUSE_SECONDS, 2.0 ** (number - 1)) if number > 1 else 0.0)
        self._starts.append(moment)
        self._born[slot] = moment
        return moment

    def in_words(self) -> str:
        """How much of it is used: `1 of 3 within 600 s`."""
        return f"{len(self._starts)} of {self.retries} within {self.seconds:g} s"
