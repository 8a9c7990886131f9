"""Whom a loader follows: the engine that trains on its batches, whose ranks may come and go."""

from __future__ import annotations

from collections import deque

from shardwise.data.recipe import Place
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
        self._begun: deque[tuple[int, Place]] = deque(maxlen=MOST_BEGUN)

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

    def begin(self, place: Place) -> None:
        """The first micro-batch of the step at `place` is handed out now."""
        self._begun.append((self._engine.num_steps, place))

    def forget(self) -> None:
        """The loader goes elsewhere: what comes next is not what came before."""
        self._begun.clear()
        self._num_void = self._engine.num_void

    def place_after(self, num_steps: int, now: Place) -> Place:
        """Where `again` would go back to if there were so many; `now` if nowhere."""
        return next((place for taken, place in self._begun if taken >= num_steps), now)

    def again(self) -> Place | None:
        """Where to go back to, if a step of which batches were handed out has been made void since the last call."""
        if self._engine.num_void == self._num_void:
            return None
        self._num_void = self._engine.num_void
        taken = self._engine.num_steps
        back: Place | None = None
        while self._begun and self._begun[-1][0] >= taken:
            back = self._begun.pop()[1]
        return back

    def weigh(self, share: Share, count: int) -> None:
        """What is handed out now has `count` rows that count."""
        self._engine.weigh(count, share.batch_rows / share.accumulate)
