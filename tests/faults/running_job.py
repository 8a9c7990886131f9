"""An elastic job whose launcher tests kill, so that nobody is a parent to hear how it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.faults.test_members import all_facts
from tests.patience import PATIENCE, wait_until


class RunningJob:
    """One whose launcher prints to the file `said` of the folder `out`, and has its logs in `logs` there."""

    def __init__(self, out: Path) -> None:
        self.out = out

    @property
    def said(self) -> str:
        return (self.out / "said").read_text()

    @property
    def status(self) -> int | None:
        """The exit status of the job; `None` before it has ended."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.out / "logs" / "exit-status").read_text())
        return None

    def until(self, is_so: Callable[[], bool], seconds: float = PATIENCE) -> None:
        wait_until(is_so, lambda: self.said, seconds=seconds)

    def until_joined(self, number: int) -> None:
        self.until(lambda: len(all_facts(self.out, "joined", "pid")) >= number)
