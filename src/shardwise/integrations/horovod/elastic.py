"""`hvd.elastic`: state that can be restored to its last commit, and a decorator that runs a training loop again.

[Note: ranks of an elastic job] Under `shardwise launch --elastic MIN:MAX`, the world of a session has generations
(`docs/elastic.md`). The launcher notices that a rank has died and tells the others. Ranks that wait for the lost rank
raise `HorovodInternalError`. All surviving ranks do a rendezvous and open a new session, with a new coordinator on rank
0, which is always a survivor. A new rank opens its first session at that time, in `init`; its first collective is the
one with which the others restart their loop: `state.sync()`.

In other jobs, only errors that all ranks raise can be recovered from.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.integrations.horovod import basics
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt

_MAX_RETRIES = 3
_log = logging.getLogger("shardwise")


class State:
    """The state of a training loop. `commit` it every few steps."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self.num_commits = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Register functions to call before the loop runs again, for example to adjust the learning rate."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self.reset()
        for callback in self._callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Not called: `check_host_updates` checks instead."""

    def commit(self) -> None:
        """`save`, and let ranks join and leave the job. All ranks call. Resets the number of retries."""
        self.save()
        self.num_commits += 1
        membership = current_session().world.membership
        if membership is not None:
            membership.step = max(membership.step, self.num_commits)
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if a rank is waiting to join or leave. All ranks call.

        Sends one small message in an elastic job, and nothing in other jobs.
        """
        session = current_session()
        membership = session.world.membership
        if membership is not None:
            is_wanted = torch.tensor([int(membership.changes_wanted())], device="cpu")
            if int(session.issue_tensors("allreduce", "elastic.changes", [is_wanted], op="Max").wait()):
                raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Copy the state, as the one to which `restore` returns."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the last saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Copy rank 0's state to all ranks."""
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
        """Copy rank 0's values to all ranks, and save them."""
        if self._values:
            values = self._bcast_object({name: getattr(self, name) for name in self._values}, 0, "elastic.state")
            for name, value in values.items():
                setattr(self, name, value)
        self.save()


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `train(state, ...)`: run it with rank 0's state, and run it again after an error of all ranks.

    After a `HorovodInternalError` the state of the last commit is restored, up to 3 times without a commit in between.
    In an elastic job the surviving and the new ranks continue. In other jobs all ranks must be able to reconnect.
    See [Note: ranks of an elastic job].
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        retries = 0
        skips_sync = False
        while True:
            commits = state.num_commits
            try:
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                retries = retries + 1 if state.num_commits == commits else 1
                if retries > _MAX_RETRIES:
                    raise
                _log.warning("Back to the last commit: %s", error)
                _reconnect(error)
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skips_sync = interrupt.skip_sync
                if current_session().world.membership is not None:
                    basics.regroup()
                    skips_sync = False
            state.on_reset()

    return wrapper


def _reconnect(error: HorovodInternalError) -> None:
    """Open a new session, in which no collective of the failed loop is in flight. All ranks call."""
    if current_session().world.membership is not None:
        basics.regroup()
        return
    try:
        basics.restart()
    except ShardwiseError as cause:
        raise HorovodInternalError(
            f"{error} The ranks could not reconnect ({cause}). With `shardwise launch --elastic MIN:MAX`, surviving "
            f"ranks continue without lost ones."
        ) from cause
