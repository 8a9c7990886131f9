"""How often a piece of work calls functions of Python: work that no clock and no other load changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import shardwise as sw

OWN = str(Path(sw.__file__).parent)
"""Where this library's own files lie."""
MESSAGES = str(Path(OWN, "comm", "transport"))
"""Those among them that look for messages, as often as these are late."""


def calls_during(work: Callable[[], object], within: str = "", but: str = "/nowhere/") -> int:
    """Those that `work` makes on this thread, of files whose path begins with `within`; without those of files whose
    path begins with `but`, and what these call."""
    num_calls = depth = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls, depth
        path = frame.f_code.co_filename
        if path.startswith(but):
            depth += (event == "call") - (event == "return")
        else:
            num_calls += event == "call" and not depth and path.startswith(within)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return num_calls
