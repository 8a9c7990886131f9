"""How long the others wait for a member that does not answer."""

from __future__ import annotations

from collections.abc import Callable

from shardwise.launch.elastic.processes import Process

STOPPED_SECONDS = 0.5
"""After this time without an answer, a member that the system has stopped is given up."""
DYING_SECONDS = 2
"""How long a member that has raised may take to end."""
SILENT_SECONDS = 30
"""How long a running member may not answer."""


def dies_too_long(process: Process, now: float) -> bool:
    """Whether it has raised and should have ended by now."""
    return process.is_dying_since is not None and now - process.is_dying_since > DYING_SECONDS


def is_stopped_too_long(process: Process, seconds: float, is_stopped: Callable[[int, int], bool]) -> bool:
    """Whether the system has stopped it, and the others have waited for it for `seconds`."""
    return seconds > STOPPED_SECONDS and is_stopped(process.number, process.pid)


def too_late(process: Process, seconds: float, *, has_heard: bool) -> str:
    """Why it is given up, if the others have waited for it for `seconds`: words that continue "it"; empty if it is not.

    `has_heard` tells whether it has read the announcement that the others follow.
    """
    if not has_heard and seconds > SILENT_SECONDS:
        return f"did not answer for {SILENT_SECONDS} s"
    if seconds > process.patience_seconds + SILENT_SECONDS:
        return f"did not rejoin the others for {seconds:.0f} s"
    return ""
