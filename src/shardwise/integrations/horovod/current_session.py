"""The session of the calling thread or process."""

from __future__ import annotations

import threading

import shardwise as sw
from shardwise.integrations.horovod.session import Session


class _Sessions(threading.local):
    """The session of this thread, where a thread was given a world of its own."""

    own: Session | None = None


class _Process:
    """The session of this process, for all threads that have none of their own."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.world: sw.World | None = None
        """What `shutdown` leaves for another `init`."""
        self.own = _Sessions()
        self.is_registered = False

    @property
    def current(self) -> Session | None:
        return self.own.own or self.session


PROCESS = _Process()


def current_session() -> Session:
    """This rank's session. Raises `ValueError` before `init` and after `shutdown`."""
    session = PROCESS.current
    if session is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return session
