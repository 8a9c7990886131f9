"""How many processes may be started in the place of dead ones."""

from __future__ import annotations

from collections import deque

_SOON_SECONDS = 30
_LONGEST_PAUSE_SECONDS = 30


class Budget:
    """`retries` starts within any `seconds`."""

    def __init__(self, retries: int, seconds: float) -> None:
        self.retries = retries
        self.seconds = seconds
        self._starts: deque[float] = deque()
        self._born: dict[int, float] = {}
        self._num_soon: dict[int, int] = {}

    def ask(self, slot: int, now: float) -> float | None:
        """When to start a process in a `slot` whose process has died; `None` if there were too many.

        At once, as a rule. Where one after the other dies soon after its start, the pauses grow.
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

    @property
    def num_used(self) -> int:
        return len(self._starts)
