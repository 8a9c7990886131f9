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
    """Several messages, then something to do with what they brought.

    [Note: messages that have arrived] `wait` may be called again after it has raised: whoever gives up a transfer does
    so. Then it goes on with the message that failed, which raises again. A message that has arrived must not be waited
    for twice: gloo would wait for another one, until the world's timeout.
    """

    def __init__(self, messages: Sequence[Work], finish: Callable[[], None] | None = None) -> None:
        self._messages = messages
        self._num_arrived = 0
        self._finish = finish

    def wait(self) -> None:
        num_arrived = self._num_arrived
        try:
            for message in self._messages[num_arrived:]:
                message.wait()
                num_arrived += 1
        finally:
            self._num_arrived = num_arrived
        self._messages, self._num_arrived = (), 0
        if self._finish is not None:
            self._finish()
            self._finish = None
