"""Which units come next while ranks compute at their own pace, by what they have used before."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

_END = -1
"""In the past: a call of the model has returned."""
_LEAST_PAST = 256


class GatherOrder:
    """The same on all ranks, which note the same: units are numbers.

    A forward mostly uses the units that the forward before has used. So with the one that is needed now, those that
    followed it the last time can be agreed on, until the model has returned. If calls follow each other
    (`goes_on`), the first unit of the next call is added.
    """

    def __init__(self, num_units: int, *, goes_on: bool) -> None:
        self._past: deque[int] = deque(maxlen=max(_LEAST_PAST, 8 * num_units))
        self._goes_on = goes_on

    def note(self, gathered: Sequence[int], unused: Collection[int], end: int | None) -> None:
        """`gathered` is what was agreed on. At places `unused` in it no rank needed the unit; a call of the model has
        returned when the first `end` of them had come."""
        for place in range(len(gathered) + 1):
            if place == end:
                self._past.append(_END)
            if place < len(gathered) and place not in unused:
                self._past.append(gathered[place])

    def after(self, number: int) -> list[int]:
        """The units to gather after `number`, by what followed its latest use, if there is one that came after the same
        unit: to the end of the call, or, where none is noted, to the next use."""
        past = list(self._past)
        places = [place for place, one in enumerate(past[:-1]) if one == number]
        if not places:
            return []
        before = past[-2] if past[-1] == number else past[-1]
        rest = past[max(places, key=lambda place: (place > 0 and past[place - 1] == before, place)) + 1 :]
        if _END not in rest:
            return rest[: rest.index(number) + 1] if number in rest else rest
        end = rest.index(_END)
        return rest[:end] + ([one for one in rest[end:] if one != _END][:1] if self._goes_on else [])
