"""What SIGTERM means to one rank of an elastic job: it takes its step to the end and leaves; the others go on.

So a preempted host, a spot instance, `scancel --signal` or an evicted pod costs no step. Where the launcher itself was
asked to end, or too few would be left, the job ends as any other does.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Protocol

from shardwise.job_folder import ENDING


class Leaves(Protocol):
    """What of a membership it takes to leave."""

    folder: Path | None

    @property
    def size(self) -> int:
        """Ranks of the present generation; 0 between two."""
        ...

    def leave(self) -> None: ...


class Departure:
    """Of this process."""

    def __init__(self) -> None:
        self._membership: Leaves | None = None
        self._least = 1
        self._has_asked = False

    def follow(self, membership: Leaves, limits: str) -> None:
        """`membership` is this process's from here on; `limits` are the fewest and the most ranks, such as `2:8`. A
        SIGTERM that nobody else handles leads to `ask`."""
        self._membership, self._has_asked = membership, False
        self._least = int(limits.partition(":")[0] or 1)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)

    def ask(self) -> bool:
        """Ask to leave at the next step boundary. False, and nothing asked, where that is not how it ends: a job that
        is not elastic, that ends as a whole, or that needs this rank; or where it has been asked before."""
        membership = self._membership
        if membership is None or self._has_asked or self._is_ending(membership):
            return False
        if 0 < membership.size <= self._least:
            return False
        self._has_asked = True
        membership.leave()
        return True

    def _is_ending(self, membership: Leaves) -> bool:
        return membership.folder is None or (membership.folder / ENDING).exists()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.ask():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


DEPARTURE = Departure()
