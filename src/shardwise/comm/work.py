"""Something on its way, and the moment it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shardwise.errors import CommError


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
            try:
                message.wait()
            except RuntimeError as error:
                raise CommError(f"A message between ranks did not arrive: {error}") from error
        self._messages = ()
        if self._finish is not None:
            self._finish()
            self._finish = None
