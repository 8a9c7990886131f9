"""State that goes back to its last commit, and a loop that is run again from there.

[Note: ranks of an elastic job] Under `shardwise launch --elastic MIN:MAX` the world of a session has generations
(`docs/elastic.md`): the launcher sees who dies, and says so. Whoever waits for the dead raises `HorovodInternalError`,
and all that live meet in the next generation, where they make a session anew: rank 0, which is one of those that were
there before, has a new coordinator, to which all connect. One that comes makes its first session then, in `init`, and
its first message is the one with which the others begin their loop again, `state.sync()`.

In any other job what is survived is an error that all ranks have raised and none has died of.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.integrations.horovod import context
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

_MOST_RETURNS = 3
_log = logging.getLogger("shardwise")


class State:
    """What a loop would lose: `commit` it every few steps."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self.num_commits = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Called after a return to the last commit, before the loop is run again: such as for the learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Nobody calls it here: ranks are asked in `check_host_updates`."""

    def commit(self) -> None:
        """`save`, begin to count returns anew, and let ranks come and leave. All ranks call."""
        self.save()
        self.num_commits += 1
        membership = current_session().world.membership
        if membership is not None:
            membership.step = max(membership.step, self.num_commits)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` if a rank waits to come in, or asks to leave. All ranks call, and all raise.

        One small message in an elastic job, and nothing in any other.
        """
        session = current_session()
        membership = session.world.membership
        if membership is not None:
            wanted = torch.tensor([int(membership.changes_wanted())])
            if int(session.on_tensors("allreduce", "elastic.changes", [wanted], op="Max").wait()):
                raise HostsUpdatedInterrupt

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """For subclasses."""


class ObjectState(State):
    """Plain values as attributes: `ObjectState(hvd.broadcast_object, batch=0)`."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self._bcast_object = bcast_object
        self._values = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        self._values = {name: copy.deepcopy(getattr(self, name)) for name in self._values}

    def restore(self) -> None:
        for name, value in self._values.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Rank 0's values on all ranks, kept as by `save`."""
        if self._values:
            told = self._bcast_object({name: getattr(self, name) for name in self._values}, 0, "elastic.state")
            for name, value in told.items():
                setattr(self, name, value)
        self.save()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `train(state, ...)`: it begins with rank 0's state, and after an error of all ranks with the last
    commit's.

    `HorovodInternalError` takes the state back and runs the function again, up to 3 times without a commit in between.
    In an elastic job the ranks that live go on, with those that have come. In any other the world is made anew if all
    ranks can meet again; if not, the error says what to do. See [Note: ranks of an elastic job].
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        returns = 0
        skips_sync = False
        while True:
            commits = state.num_commits
            try:
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                returns = returns + 1 if state.num_commits == commits else 1
                if returns > _MOST_RETURNS:
                    raise
                _log.warning("Back to the last commit: %s", error)
                _form_again(error)
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skips_sync = interrupt.skip_sync
                if current_session().world.membership is not None:
                    context.regroup()
                    skips_sync = False
            state.on_reset()

    return wrapper


def _form_again(error: HorovodInternalError) -> None:
    """Meet again, if the ranks have lost each other. All of them call, as all have raised."""
    if current_session().world.membership is not None:
        context.regroup()
        return
    if current_session().pending.error is None:
        return
    context.shutdown()
    try:
        context.init()
    except ShardwiseError as refusal:
        raise HorovodInternalError(
            f"{error} The ranks could not meet again ({refusal}). Run `shardwise launch --elastic MIN:MAX`, by which "
            f"ranks go on without those that are lost."
        ) from refusal
