"""Steps taken by one call, `train_step`: a void one is repeated with the same batch.

[Note: batches of steps that are undone] A step can be undone after it has ended (see [Note: the commit] in
`session.py`). A loop that follows its engine, by a loader or by `engine.num_steps` and `weigh`, then passes its batch
again. For other loops the last batch is kept here, and that step is repeated before anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from shardwise.micro_batches import LossFunction

if TYPE_CHECKING:
    from shardwise.elastic.session import ElasticSession


@dataclass(frozen=True)
class _Arguments:
    """The arguments of the last step."""

    batch: Any
    target: Any
    loss_fn: LossFunction | None
    iteration: int


class WholeSteps:
    """The whole steps of one session."""

    def __init__(self, session: ElasticSession) -> None:
        self._session = session
        self._last: _Arguments | None = None

    def train(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> torch.Tensor:
        """See `Engine.train_step`."""
        session = self._session
        draws = isinstance(batch, Iterator)
        while True:
            progress = session.progress
            before = progress.num_void
            now = list(islice(batch, session.plan.accumulate)) if draws else batch
            loss = session.forward_backward(now, target, loss_fn)
            session.step()
            is_followed = progress.weighing.is_used  # then the loader reads the step's data again
            if progress.num_void == before:
                self._last = self._remembered(now, target, loss_fn)
                return loss
            if is_followed and not draws:
                return loss
            self.take_again()

    def take_again(self) -> None:
        """Repeat the last step, if it was undone."""
        session, given = self._session, self._last
        if given is None or not session.is_undone(given.iteration):
            return
        settings = session.loop_state.settings()
        while True:
            before = session.progress.num_void
            session.forward_backward(given.batch, given.target, given.loss_fn)
            session.step()
            if session.progress.num_void == before:
                break
        self._last = replace(given, iteration=session.begun)
        if settings is not None:  # schedulers have counted that step already, or are about to
            settings.restore()

    def _remembered(self, batch: Any, target: Any, loss_fn: LossFunction | None) -> _Arguments | None:
        """A copy of the arguments, since a loop may refill its batch. `None` if the step cannot be undone, or if the
        loop would pass the batch again."""
        session = self._session
        if not session.may_be_undone or session.progress.weighing.is_used:
            return None
        batch, target = _pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, (batch, target))
        return _Arguments(batch, target, loss_fn, session.begun)
