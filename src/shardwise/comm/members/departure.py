"""SIGTERM to one rank of an elastic job: it finishes its step and leaves; the others continue.

So a preempted host, a spot instance, `scancel --signal` or an evicted pod costs no step. If the launcher itself was
asked to end, or too few ranks would be left, the job ends as any other does.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Protocol

from shardwise.system.job_folder import ENDING


class CanLeave(Protocol):
    """The part of a membership that leaving needs."""

    folder: Path | None

    @property
    def size(self) -> int:
        """Ranks of the current generation; 0 between two generations."""
        ...

    @property
    def least(self) -> int:
        """The fewest ranks that the job continues with."""
        ...

    def leave(self, *, must_go: bool = False) -> None: ...


class Departure:
    """How this process leaves its elastic job."""

    def __init__(self) -> None:
        self._membership: CanLeave | None = None
        self._has_asked = False

    def follow(self, membership: CanLeave) -> None:
        """Set this process's `membership`. From here on a SIGTERM that has no handler yet calls `ask`."""
        self._membership, self._has_asked = membership, False
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)

    def ask(self) -> bool:
        """Ask to leave at the next step boundary. Returns false, without asking, if the job is not elastic, ends as a
        whole, or needs this rank, or if this rank has asked before. Several ranks may ask at once: the launcher, which
        sees all of them, asks all ranks to end if too few would remain."""
        membership = self._membership
        if membership is None or self._has_asked or self._is_ending(membership):
            return False
        if 0 < membership.size <= membership.least:
            return False
        self._has_asked = True
        membership.leave(must_go=True)
        return True

    def _is_ending(self, membership: CanLeave) -> bool:
        return membership.folder is None or (membership.folder / ENDING).exists()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if not self.ask():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


DEPARTURE = Departure()
