"""What ranks agree on in a pass that follows no program: which unit is gathered next, and which backwards are closed.

[Note: rounds of a pass] Ranks need not take the same path through the model: the images of a batch may all be on one
rank, and an expert may get no token on another. So in a pass without a program no rank gathers by itself. It asks in a
round, in which every rank tells which unit it needs, if any, or that it has come to the end (of the model's forward, or
of the backward), where it takes part in rounds until all others have come there too. Of the units that are needed all
ranks gather one; who asked for another asks again. Units that every rank has by itself are not asked for, so that with
parameters that are copies a forward sends nothing.

[Note: who goes first] A unit that fewer ranks ask for goes first, for they have a path of their own, and then come to
where the others wait; otherwise what follows would be gathered twice. If that is equal, what has been needed less often
so far goes first, and forwards before backwards.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from shardwise.memory import Unit
from shardwise.runtime.gathering import Gathering

End = Literal["", "forward", "backward"]


class Report(NamedTuple):
    """What one rank tells in a round; units by their numbers."""

    wish: int | None = None
    """The unit that it needs."""
    is_backward: bool = False
    """Whether it needs that for a backward."""
    end: End = ""
    """Of what it has come to the end, and waits for the others."""
    ended: Sequence[int] = ()
    """Units whose backward has ended there and is not closed yet."""
    left: Sequence[int] = ()
    """Units with gradients there although no event has reported the end of their backward."""
    awaited: Sequence[int] = ()
    """Units that have computed their forward there, and whose backward has not begun."""


class Side(Protocol):
    """What a round is about besides gathers."""

    def report(self, end: End) -> Report:
        """What this rank has to tell, at this end."""
        ...

    def act(self, reports: Sequence[Report]) -> None:
        """All ranks' reports have come."""
        ...


class NoGradients:
    """A pass without a backward."""

    def report(self, end: End) -> Report:
        return Report(end=end)

    def act(self, reports: Sequence[Report]) -> None:
        pass


class Rounds:
    """The rounds of one model. All ranks of its data-parallel group call `need` and `finish`, in any order."""

    def __init__(self, gathering: Gathering, exchange: Callable[[bytes], list[bytes]]) -> None:
        self._gathering = gathering
        self._exchange = exchange
        self._units = gathering.units
        self._numbers = {unit.name: number for number, unit in enumerate(self._units)}
        self._num_needed = Counter[int]()
        """How often ranks have needed each unit. The same on all of them."""

    def number(self, name: str) -> int:
        return self._numbers[name]

    def unit(self, number: int) -> Unit:
        return self._units[number]

    def forget(self) -> None:
        """Something raised, on any rank: nothing is known to be the same on all."""
        self._num_needed.clear()

    def need(self, unit: Unit, side: Side, *, is_backward: bool, meets: bool = False) -> None:
        """Return when `unit` is whole here; with `meets` after at least one round."""
        while meets or not _is_ready(unit):
            meets = False
            wish = None if _is_ready(unit) else self._numbers[unit.name]
            self._round(side, side.report("")._replace(wish=wish, is_backward=is_backward))

    def meet(self, side: Side) -> None:
        """One round, of which this rank needs nothing: for gradients of weights, which are made without parameters."""
        self._round(side, side.report("")._replace(is_backward=True))

    def finish(self, side: Side, end: End) -> None:
        """This rank has come to the end of the model's forward, or of a backward. Returns when all have."""
        while not all(one.end for one in self._round(side, side.report(end))):
            pass

    def _round(self, side: Side, mine: Report) -> list[Report]:
        """The reports of all ranks."""
        with self._gathering.unwatched():
            reports = [Report(*json.loads(message)) for message in self._exchange(json.dumps(mine).encode())]
            side.act(reports)
            chosen = self._chosen(reports)
            if chosen is not None:
                self._gathering.gather_with_others(self._units[chosen], keeps=chosen == mine.wish)
        return reports

    def _chosen(self, reports: Sequence[Report]) -> int | None:
        """The unit that is gathered now: see [Note: who goes first]."""
        wishes = Counter((one.wish, one.is_backward) for one in reports if one.wish is not None)
        if not wishes:
            return None
        order = {wish: (wish[1], count, self._num_needed[wish[0]], wish[0]) for wish, count in wishes.items()}
        chosen = min(order, key=lambda wish: order[wish])[0]
        self._num_needed[chosen] += sum(one.wish == chosen for one in reports)
        return chosen


def _is_ready(unit: Unit) -> bool:
    return all(flat.is_whole and not flat.must_be_gathered_again for flat in unit.flats)
