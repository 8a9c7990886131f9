"""How often a piece of work calls functions of Python: work that no clock and no other load changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import shardwise as sw

OWN = str(Path(sw.__file__).parent)
"""Where this library's own files lie."""


def calls_during(work: Callable[[], object], within: str = "") -> int:
    """Those that `work` makes on this thread, of files whose path begins with `within`."""
    num_calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        num_calls += event == "call" and frame.f_code.co_filename.startswith(within)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls
