"""The current session: of the calling thread if it has its own, else of the process."""

from __future__ import annotations

import threading

import shardwise as sw
from shardwise.integrations.horovod.session import Session


class _ThreadLocal(threading.local):
    session: Session | None = None
    """Of a thread that called `init(comm=world)`."""


class _CurrentSession:
    def __init__(self) -> None:
        self.of_thread = _ThreadLocal()
        self.of_process: Session | None = None
        self.idle_world: sw.World | None = None
        """The process's world between `shutdown` and the next `init`."""
        self.has_exit_handler = False

    def get(self) -> Session | None:
        return self.of_thread.session or self.of_process


CURRENT = _CurrentSession()


def current_session() -> Session:
    """This rank's session. Raises `ValueError` before `init` and after `shutdown`."""
    session = CURRENT.get()
    if session is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return session
