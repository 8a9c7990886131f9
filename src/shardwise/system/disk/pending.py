"""Waiting for calls on other threads.

[Note: a disk that answers nothing] A call to the system that a disk does not answer does not return, and nothing ends
it, not even a signal: so whoever waits for it gives up. A disk is slow and not silent as long as any of its calls
returns (`Patience`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from shardwise.errors import TierError


class Patience:
    """How long to wait for one disk, all of whose waits share this object. See [Note: a disk that answers nothing]."""

    def __init__(self, name: str = "The disk", seconds: float | None = None) -> None:
        """`seconds` in which no call returns are too many; `None`: wait for ever. `name` begins the error."""
        self.name, self.seconds = name, seconds
        self.num_done = 0
        """Calls that have returned, counted by the threads that make them."""
        self.is_over = False
        """Whether the disk has been given up."""

    def await_call(self, call: Future[Any]) -> None:
        """Return when `call` is done, however. Raises `TierError` if the disk answers nothing any more."""
        while not call.done():
            before = self.num_done
            try:
                call.exception(0 if self.is_over else self.seconds)
            except TimeoutError:
                self.is_over = self.is_over or self.num_done == before
                self.require_answers()

    def await_end(self, thread: threading.Thread) -> None:
        """Return when `thread`, which makes calls, has ended, or the disk is given up."""
        while thread.is_alive() and not self.is_over:
            before = self.num_done
            thread.join(self.seconds)
            self.is_over = thread.is_alive() and self.num_done == before

    def require_answers(self) -> None:
        """Raise `TierError` if the disk has been given up: what is under way there may happen at any time."""
        if self.is_over:
            raise TierError(
                f"{self.name} has answered nothing for {self.seconds:g} s: none of its reads and writes has ended. The "
                f"kernel's log (`dmesg`) may say why."
            )


class Pending:
    """Calls in flight on other threads, waited for together."""

    def __init__(self, calls: Sequence[Future[Any]], patience: Patience | None = None) -> None:
        self._calls = calls
        self._patience = Patience() if patience is None else patience

    def wait(self) -> None:
        """Wait for all calls; then, with none in flight any more, raise the exception of the first that failed. Raises
        `TierError` if the disk answers nothing; then they are still in flight."""
        for call in self._calls:
            self._patience.await_call(call)
        for call in self._calls:
            call.result()

    def join(self) -> None:
        """Wait for all calls and ignore failures."""
        try:
            for call in self._calls:
                self._patience.await_call(call)
        except TierError:
            return

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call `tell` once all are done: on the thread that finished last, or at once if they already are."""
        left = len(self._calls) + 1
        lock = threading.Lock()

        def one_less(_: Future[Any] | None = None) -> None:
            nonlocal left
            with lock:
                left -= 1
                is_last = not left
            if is_last:
                tell()

        for call in self._calls:
            call.add_done_callback(one_less)
        one_less()

    @property
    def has_failed(self) -> bool:
        """Whether all are done and at least one failed."""
        return self.is_done and any(call.exception() is not None for call in self._calls)

    @property
    def is_done(self) -> bool:
        return all(call.done() for call in self._calls)
