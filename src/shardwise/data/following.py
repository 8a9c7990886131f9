"""Lets a loader follow the engine that trains on its batches, whose ranks may come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from shardwise.data.recipe import Made, Place
from shardwise.data.sampling import Share
from shardwise.system.data_ranks import Follows, Reader

MAX_REMEMBERED = 64
"""How many batches have their places remembered; no more are handed out between a step and the news that it is void."""
_OF_OTHERS = -1
"""No number of void steps: there is one about which this loader has not asked yet."""


class Following:
    """A loader's view of its engine: which share to hand out, and which batches to hand out again.

    [Note: replayed batches] For each batch the number of engine steps when it was handed out is recorded. When a step
    has been made void, that number shows which batches had no effect: all that were handed out at the current number of
    steps, or later. A loader whose batches train nothing, such as one for validation, has no such batches.
    """

    def __init__(self, engine: Follows) -> None:
        self._engine = engine
        self._num_void = engine.num_void
        self._begun: deque[tuple[int, Place, Place]] = deque(maxlen=MAX_REMEMBERED)
        """For each batch handed out: the number of engine steps then, and the places before and after the batch."""
        self._left_out: int | None = None
        """The batch handed out at this number of steps is skipped and not handed out again."""
        self._passes_over = False
        """Whether the next batch, which was not handed out yet, is skipped too."""

    def attend(self, reader: Reader) -> None:
        """Make `reader` follow the engine from now on."""
        self._engine.follow(reader)

    def begin_to_read(self) -> None:
        """See `Follows`."""
        self._engine.begin_to_read()

    def reading(self) -> AbstractContextManager[None]:
        """See `Follows`."""
        return self._engine.reading()

    @property
    def ranks(self) -> tuple[int, int]:
        rank, size = self._engine.data_ranks
        return rank, size

    def begin(self, made: Made) -> None:
        """Record that the first micro-batch of `made` is handed out now."""
        self._begun.append((self._engine.num_steps, made.before, made.after))

    def leave_out(self, num_steps: int) -> None:
        """See `Reader`. When one rank fails at a batch, others may not have reached it; a loader that trains has handed
        out at least the batch before."""
        last = self._begun[-1][0] if self._begun else num_steps - 1
        if last >= num_steps:
            self._left_out = num_steps
        elif last == num_steps - 1:
            self._passes_over = True

    def passes_over(self) -> bool:
        """Whether the next batch is to be skipped; resets the flag."""
        passes_over, self._passes_over = self._passes_over, False
        return passes_over

    def forget(self) -> None:
        """Forget what was handed out, because the loader moves elsewhere."""
        self._begun.clear()
        self._left_out, self._passes_over = None, False
        self._num_void = self._engine.num_void

    def since(self, num_steps: int) -> dict[str, Any]:
        """What was handed out after `num_steps` steps, and may come again: JSON. Whether it does is known at the next
        batch: a loader for validation has handed it out, too, and goes on after it when more steps were taken."""
        begun = [(at, asdict(before), asdict(after)) for at, before, after in self._begun if at >= num_steps]
        return {"begun": begun, "left_out": self._left_out, "passes_over": self._passes_over}

    def go_on(self, there: Mapping[str, Any]) -> None:
        """On a rank that has joined: go on as if what was handed out `there` had been handed out here."""
        self._begun.extend((at, Place(**before), Place(**after)) for at, before, after in there["begun"])
        self._left_out, self._passes_over = there["left_out"], there["passes_over"]
        if self._begun:
            self._num_void = _OF_OTHERS

    def again(self) -> Place | None:
        """The place to go back to, if a step with handed-out batches was made void since the last call."""
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
        """Tell the engine that `count` rows of what is handed out now count."""
        self._engine.weigh(count, share.batch_rows / share.accumulate)
