"""What other threads are doing, and the moment when it is done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class Pending:
    """Calls under way on other threads, waited for as one."""

    def __init__(self, calls: Sequence[Future[Any]]) -> None:
        self._calls = calls

    def wait(self) -> None:
        """Return once all are done; raise what the first that failed raised, when none is under way any more."""
        for call in self._calls:
            call.exception()
        for call in self._calls:
            call.result()

    def settle(self) -> None:
        """Return once all are done, whether they failed or not: for who needs nothing of them but their end."""
        for call in self._calls:
            call.exception()

    def when_done(self, tell: Callable[[], None]) -> None:
        """Call `tell` once all are done, from the thread that was last, or now."""
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
        """Whether all are done, and any has failed."""
        return self.is_done and any(call.exception() is not None for call in self._calls)

    @property
    def is_done(self) -> bool:
        return all(call.done() for call in self._calls)
