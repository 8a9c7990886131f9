"""A communication that has been started, and its completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class LinkError(Exception):
    """A message to or from `rank` failed. Internal to this package: `Journal.failure` turns it into a `CommError`."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Work(Protocol):
    """A communication that has been started. `wait` may be called once; it raises `CommError`."""

    def wait(self) -> None: ...


class Done:
    """A work with nothing left to do."""

    def wait(self) -> None:
        return


class Pending:
    """Several messages, then something to do with what they brought."""

    def __init__(self, messages: Sequence[Work], finish: Callable[[], None] | None = None) -> None:
        self._messages = messages
        self._finish = finish

    def wait(self) -> None:
        for message in self._messages:
            message.wait()
        self._messages = ()
        if self._finish is not None:
            self._finish()
            self._finish = None
