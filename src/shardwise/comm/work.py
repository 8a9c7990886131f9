"""Something on its way, and the moment it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class LinkError(Exception):
    """A message to or from `rank` failed. Inside this package only: `Journal.failure` makes a `CommError` of it."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.rank = rank


class Work(Protocol):
    """A communication that has been started. `wait` may be asked once; it raises `CommError`."""

    def wait(self) -> None: ...


class Done:
    """Nothing was left to do."""

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
