"""Where ranks leave word for each other outside the collectives: a few keys in the store at which they met."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from shardwise.comm.fault import Fault
from shardwise.comm.status import Status

_ANSWER_SECONDS = 5
_STATUS, _FAULT, _LEFT, _WORLDS = "status", "fault", "left", "worlds"
KEY = "shardwise-watch"
Answer = TypeVar("Answer")


class Board(Protocol):
    """One world's board. Any thread of any rank may call; nothing blocks for long. Raises `BoardError`."""

    @property
    def outlives_ranks(self) -> bool:
        """Whether what was posted can still be read when the rank that posted it is gone, whichever that is."""
        ...

    def publish(self, status: Status) -> None: ...

    def read(self, rank: int) -> Status | None: ...

    def fault(self) -> Fault | None: ...

    def claim(self, fault: Fault) -> Fault:
        """Post `fault`, unless there is one already; returns the one that stands."""
        ...

    def leave(self, size: int) -> None:
        """This rank is through with the board; the last of `size` ranks wipes it."""
        ...


class BoardError(Exception):
    """The board is gone, with the process that kept it."""


class StoreBoard:
    """A board in a `torch.distributed` store, over a connection of its own."""

    def __init__(self, store: Store, size: int) -> None:
        """`store` must not be used by anybody else. All `size` ranks of a world make their boards together."""
        store.set_timeout(datetime.timedelta(seconds=_ANSWER_SECONDS))
        number = (store.add(f"{KEY}/{_WORLDS}", 1) - 1) // size
        self._store = PrefixStore(f"{KEY}/{number}", store)

    @property
    def outlives_ranks(self) -> bool:
        return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 keeps it, as a rule

    def publish(self, status: Status) -> None:
        _answered(lambda: self._store.set(f"{_STATUS}/{status.rank}", status.to_json()))

    def read(self, rank: int) -> Status | None:
        text = self._get(f"{_STATUS}/{rank}")
        return Status.from_json(text) if text is not None else None

    def fault(self) -> Fault | None:
        text = self._get(_FAULT)
        return Fault.from_json(text) if text is not None else None

    def claim(self, fault: Fault) -> Fault:
        return Fault.from_json(_answered(lambda: self._store.compare_set(_FAULT, "", fault.to_json())))

    def leave(self, size: int) -> None:
        if _answered(lambda: self._store.add(_LEFT, 1)) < size:
            return
        for key in (_FAULT, _LEFT, *(f"{_STATUS}/{rank}" for rank in range(size))):
            _answered(partial(self._store.delete_key, key))

    def _get(self, key: str) -> bytes | None:
        def ask() -> bytes | None:
            return self._store.get(key) if self._store.check([key]) else None

        return _answered(ask)


def _answered(question: Callable[[], Answer]) -> Answer:
    try:
        return question()
    except RuntimeError as error:
        raise BoardError(str(error)) from error


def last_words(store: Store, rank: int, prefix: str) -> str:
    """What a rank that is gone was doing when it was last heard of; `""` if it never said."""
    ending = f"/{_STATUS}/{rank}"
    keys = [key for key in store.list_keys() if f"{prefix}/{KEY}/" in key and key.endswith(ending)]
    last = max(keys, key=lambda key: int(key.removesuffix(ending).rpartition("/")[2]), default="")
    return str(Status.from_json(store.get(last))) if last else ""
