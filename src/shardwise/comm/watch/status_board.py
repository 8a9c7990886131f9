"""Where ranks post messages for each other outside the collectives: a few keys in the store at which they met."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from shardwise.comm import compat
from shardwise.comm.compat import Store
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.sealed_store import SealedStore, opened
from shardwise.comm.watch.sockets import end_silence
from shardwise.comm.watch.status import Status
from shardwise.errors import CommError
from shardwise.system.job_token import Seal
from shardwise.system.process_rank import launcher_keeps_store

_ANSWER_SECONDS = 5
_STATUS, _FAULT, _LEFT, _WORLDS = "status", "fault", "left", "worlds"
KEY = "shardwise-watch"
Answer = TypeVar("Answer")


class Board(Protocol):
    """One world's board. Any thread of any rank may call; nothing blocks for long. Raises `BoardError`."""

    @property
    def outlives_ranks(self) -> bool:
        """Whether what a rank posted can still be read after that rank is gone, whichever rank it is."""
        ...

    def publish(self, status: Status) -> None: ...

    def read(self, rank: int) -> Status | None: ...

    def fault(self) -> Fault | None: ...

    def claim(self, fault: Fault) -> Fault:
        """Post `fault`, unless there is one already; returns the one that counts."""
        ...

    def leave(self, size: int) -> None:
        """This rank no longer uses the board; the last of `size` ranks deletes it."""
        ...


class BoardError(Exception):
    """The board cannot be reached."""

    @property
    def is_closed(self) -> bool:
        """Whether its connection was closed, so that the process that kept it is gone; else it did not answer."""
        return not re.search(r"time.?out|timed out", str(self), re.IGNORECASE)


class StoreStatusBoard:
    """A board in a `torch.distributed` store, over a connection of its own.

    Values that no member of the job has written are ignored: see [Note: whom ranks believe] in `sealed_store.py`.
    """

    def __init__(
        self,
        store: Store,
        size: int,
        seal: Seal,
        number: int | None = None,
        another: Callable[[], Store | None] = lambda: None,
    ) -> None:
        """`store` must not be used by any other code. All `size` ranks of a world create their boards together.

        `number` is that of the world, the same on all ranks; the default is counted in the store. `another` returns
        the store that has replaced one that is gone, or `None`.
        """
        store.set_timeout(datetime.timedelta(seconds=_ANSWER_SECONDS))
        if number is None:
            number = (store.add(f"{KEY}/{_WORLDS}", 1) - 1) // size
        self._prefix, self._seal, self._another = f"{KEY}/{number}", seal, another
        self._store = SealedStore(self._prefix, store, self._seal)
        self._is_gone = False

    @property
    def outlives_ranks(self) -> bool:
        return launcher_keeps_store(os.environ)

    def publish(self, status: Status) -> None:
        self._answered(lambda: self._store.set(f"{_STATUS}/{status.rank}", status.to_json()))

    def read(self, rank: int) -> Status | None:
        return self._read(f"{_STATUS}/{rank}", Status.from_json)

    def fault(self) -> Fault | None:
        return self._read(_FAULT, Fault.from_json)

    def claim(self, fault: Fault) -> Fault:
        text = fault.to_json()
        try:
            return Fault.from_json(self._answered(lambda: self._store.set_once(_FAULT, text)))
        except (CommError, ValueError):  # written by a stranger
            self._answered(lambda: self._store.set(_FAULT, text))
            return fault

    def leave(self, size: int) -> None:
        if self._answered(lambda: self._store.add(_LEFT, 1)) < size:
            return
        for key in (_FAULT, _LEFT, *(f"{_STATUS}/{rank}" for rank in range(size))):
            self._answered(partial(self._delete, key))

    def _delete(self, key: str) -> None:
        self._store.delete_key(key)

    def _answered(self, question: Callable[[], Answer]) -> Answer:
        """The store's answer. A question to one that is gone is asked once; the next one goes to what replaces it."""
        try:
            if self._is_gone and (store := self._another()) is not None:
                store.set_timeout(datetime.timedelta(seconds=_ANSWER_SECONDS))
                self._store, self._is_gone = SealedStore(self._prefix, store, self._seal), False
            return question()
        except CommError:
            raise
        except RuntimeError as error:
            self._is_gone = True
            raise BoardError(str(error)) from error

    def _read(self, key: str, parse: Callable[[bytes], Answer]) -> Answer | None:
        def ask() -> bytes | None:
            return self._store.get(key) if self._store.check([key]) else None

        try:
            content = self._answered(ask)
            return None if content is None else parse(content)
        except (CommError, ValueError):  # written by a stranger
            return None


def last_status(store: Store, rank: int, prefix: str, seal: Seal | None = None) -> str:
    """What a rank that is gone last reported; `""` if it never reported anything."""
    ending = re.compile(rf".*{re.escape(prefix)}/(?:.*/)?{KEY}/(\d{{1,9}})/{_STATUS}/{rank}", re.DOTALL)
    found = {int(match[1]): match[0] for match in map(ending.fullmatch, store.list_keys()) if match}
    if not found:
        return ""
    name = f"{KEY}/{max(found)}/{_STATUS}/{rank}"
    try:
        return str(Status.from_json(opened(seal or Seal(), name, store.get(found[max(found)]))))
    except (CommError, ValueError):  # written by a stranger
        return ""


def board_of(
    size: int,
    seal: Seal,
    timeout_seconds: float,
    number: int | None = None,
    stores: Callable[[], Store | None] | None = None,
) -> StoreStatusBoard | None:
    """A board in the store at which torch's process group met; `None` if that store has only one connection. `number`
    as for `StoreStatusBoard`. `stores` returns that store, and later each that replaces it."""

    def another() -> Store | None:
        store = compat.another_connection() if stores is None else stores()
        if store is not None:
            end_silence(compat.port_of(store), timeout_seconds)
        return store

    store = another()
    if store is None:
        return None
    return StoreStatusBoard(store, size, seal, number, (lambda: None) if stores is None else another)
