"""How each rank ended, and which one failed first."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ENDED = ".ended"
"""Added to the name of a rank's error file: a file that the rank writes when its interpreter ends."""

# Exit codes of a script that ended because it was asked to, by whichever signal.
_STOPPED = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """The end of one rank.

    `exit_code` is negative for a signal, as in `subprocess`. `sent` is the last signal that the launcher had sent
    before the rank ended, `sent_at` when it sent the first. `time` (seconds since the epoch) is when the exception was
    recorded, or else when the rank was last seen alive: see [Note: who failed first]. `last_status` is what the rank
    last published. `wanted` is the exit code of a recorded `SystemExit` or `KeyboardInterrupt`, and `at_fault`
    are the ranks at fault according to the exception.
    """

    rank: int
    exit_code: int
    sent: signal.Signals | None
    time: float
    summary: str = ""
    traceback: str = ""
    recorded: bool = False
    last_status: str = ""
    sent_at: float = math.inf
    wanted: int | None = None
    at_fault: tuple[int, ...] = ()
    batch: str = ""
    """A description of the samples that a rank had when it raised, if known."""
    is_status_lost: bool = False
    """Whether the launcher that started the rank was killed before the rank ended. Only a parent learns its child's
    exit status, so a rank that left no record then is taken for killed."""
    lost_with: str = ""
    """If the rank was lost with its host: how the host was lost. How the rank itself ended is not known then."""

    @property
    def failed(self) -> bool:
        """Whether the rank failed by itself, rather than because the launcher ended it."""
        if self.lost_with:
            return True
        if self.wanted is not None:
            return self.time < self.sent_at or self.wanted not in (0, *_STOPPED)
        if self.recorded:
            # any signal was sent later, unless the script answered it with sys.exit(128 + n)
            return self.sent is None or self.exit_code != 128 + self.sent
        return self.exit_code != 0 and self.sent is None

    @property
    def raised(self) -> bool:
        """Whether it ended with an exception, rather than with sys.exit or a signal."""
        return self.recorded and self.wanted is None and not self.summary.startswith("SystemExit")

    @property
    def obeyed(self) -> bool:
        """Whether it ended the way a process ends that was sent a signal."""
        if self.sent is None or self.failed:
            return False
        return self.exit_code in (-self.sent, *_STOPPED)

    @property
    def ended_early(self) -> bool:
        """Whether its script ended successfully before it was asked to end."""
        return self.exit_code == 0 and self.sent is None

    @property
    def status(self) -> int:
        """The exit status a shell would show for the failure itself.

        That is 1 for a rank that raised, and the code given to `sys.exit`, even if the process then ended otherwise: by
        the launcher's signal, or by an abort of native code during shutdown (gloo's threads do that at times).
        """
        if self.wanted is not None:
            return self.wanted
        if self.raised or self.ended_early:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


_CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Illegal instruction": signal.SIGILL,
    "Floating point exception": signal.SIGFPE,
}
"""The first line that `faulthandler` writes."""


# [Note: who failed first]
# When one rank dies, its peers fail within milliseconds because their connection to it broke. A rank that raises
# records the time itself. One that is killed cannot: the launcher notices at its next poll. Taking the last poll at
# which it was alive errs towards blaming it. That is right, since being killed is seldom the consequence of a peer's
# exception, and the reverse is common.
#
# A rank that raises our FaultError names the ranks at fault. If one of those failed by itself too, or its script ended
# while the others needed it, that rank is the first, whatever the clocks say.
def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The rank that failed by itself before any other, or ended too early without failing; None if there is none."""
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    first = min((one for one in by_rank.values() if one.failed), key=lambda one: one.time, default=None)
    if first is None or first.rank in first.at_fault:
        return first
    blamed = [by_rank[rank] for rank in first.at_fault if rank in by_rank]
    guilty = [one for one in blamed if one.failed] or [one for one in blamed if one.ended_early]
    return min(guilty, key=lambda one: one.time, default=first)


def recorded_exit_code(error_file: Path) -> int | None:
    """The exit code of a rank that has ended, by the files that it left; `None` if it left none."""
    outcome = read_outcome(0, 0, None, 0.0, error_file)
    if outcome.recorded:
        return 1 if outcome.wanted is None else outcome.wanted
    for words, number in _CRASHES.items():
        if words in outcome.traceback:
            return -number
    return 0 if Path(f"{error_file}{ENDED}").exists() else None


def read_outcome(
    rank: int,
    exit_code: int,
    sent: signal.Signals | None,
    last_alive: float,
    error_file: Path,
    sent_at: float = math.inf,
) -> Outcome:
    """The outcome of a rank that has ended, with what it left in its error file."""
    fault = Path(f"{error_file}.fault")
    stack = fault.read_text(errors="replace") if fault.exists() else ""
    try:
        message = json.loads(error_file.read_text())["message"]
        details = message["extraInfo"]
        return Outcome(
            rank,
            exit_code,
            sent,
            time=float(details.get("time", details["timestamp"])),
            summary=str(message["message"]),
            traceback=str(details["py_callstack"]),
            recorded=True,
            sent_at=sent_at,
            wanted=int(details["wanted"]) if details.get("wanted") is not None else None,
            at_fault=tuple(int(blamed) for blamed in details.get("at_fault", ())),
            batch=str(details.get("batch", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # no file, or another library's: only the process's end is known
        return Outcome(rank, exit_code, sent, last_alive, traceback=stack, sent_at=sent_at)
