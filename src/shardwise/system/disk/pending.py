"""Waiting for calls on other threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class Pending:
    """Calls in flight on other threads, waited for together."""

    def __init__(self, calls: Sequence[Future[Any]]) -> None:
        self._calls = calls

    def wait(self) -> None:
        """Wait for all calls; then, with none in flight any more, raise the exception of the first that failed."""
        for call in self._calls:
            call.exception()
        for call in self._calls:
            call.result()

    def join(self) -> None:
        """Wait for all calls and ignore failures."""
        for call in self._calls:
            call.exception()

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
