"""What other threads are doing, and the moment when it is done."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def is_done(self) -> bool:
        return all(call.done() for call in self._calls)
