"""Whom a loader follows: the engine that trains on its batches, whose ranks may come and go."""

from __future__ import annotations

from collections import deque

from shardwise.data.recipe import Made, Place
from shardwise.data.sampling import Share
from shardwise.data_ranks import Follows, Reader

MOST_BEGUN = 64
"""Batches whose places are remembered: more are not handed out between a step and the news that it is void."""


class Following:
    """A loader beside its engine: which share it is to hand out, and from where again.

    [Note: again] A batch is handed out after so many steps of the engine. When a step has been made void, that number
    says which batches have had no effect: all that were handed out after as many steps as there are now, or more.
    A loader whose batches train nothing, as one for validation, has none of those.
    """

    def __init__(self, engine: Follows) -> None:
        self._engine = engine
        self._num_void = engine.num_void
        self._begun: deque[tuple[int, Place, Place]] = deque(maxlen=MOST_BEGUN)
        """After how many steps batches were handed out, and the places before and behind them."""
        self._left_out: int | None = None
        """The batch that was handed out after so many steps does not come again."""
        self._passes_over = False
        """Neither does the next one, which was not handed out yet."""

    def attend(self, reader: Reader) -> None:
        """`reader` follows from now on."""
        self._engine.follow(reader)

    def begin_to_read(self) -> None:
        """See `Follows`."""
        self._engine.begin_to_read()

    @property
    def ranks(self) -> tuple[int, int]:
        rank, size = self._engine.data_ranks
        return rank, size

    def begin(self, made: Made) -> None:
        """Its first micro-batch is handed out now."""
        self._begun.append((self._engine.num_steps, made.before, made.after))

    def leave_out(self, num_steps: int) -> None:
        """See `Reader`. Not all ranks have come to that batch when one fails at it; whoever trains on these batches has
        had the one before."""
        last = self._begun[-1][0] if self._begun else num_steps - 1
        if last >= num_steps:
            self._left_out = num_steps
        elif last == num_steps - 1:
            self._passes_over = True

    def passes_over(self) -> bool:
        """Whether the next batch is to be left out. Said once."""
        passes_over, self._passes_over = self._passes_over, False
        return passes_over

    def forget(self) -> None:
        """The loader goes elsewhere: what comes next is not what came before."""
        self._begun.clear()
        self._left_out, self._passes_over = None, False
        self._num_void = self._engine.num_void

    def place_after(self, num_steps: int, now: Place) -> Place:
        """Where `again` would go back to if there were so many; `now` if nowhere."""
        first = next((one for one in self._begun if one[0] >= num_steps), None)
        if first is None:
            return Place(now.step + 1) if self._passes_over else now
        return first[2] if self._left_out == first[0] else first[1]

    def again(self) -> Place | None:
        """Where to go back to, if a step of which batches were handed out has been made void since the last call."""
        if self._engine.num_void == self._num_void:
            return None
        self._num_void = self._engine.num_void
        taken = self._engine.num_steps
        back: Place | None = None
        while self._begun and self._begun[-1][0] >= taken:
            begun, before, behind = self._begun.pop()
            back = behind if begun == self._left_out else before
        if back is not None:
            self._left_out = None
        return back

    def weigh(self, share: Share, count: int) -> None:
        """What is handed out now has `count` rows that count."""
        self._engine.weigh(count, share.batch_rows / share.accumulate)
