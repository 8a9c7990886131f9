"""What became of each rank, and which of them failed first."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# A script that was asked to end may say so in any of these ways, whichever signal it was.
_STOPPED = (-signal.SIGINT, -signal.SIGTERM, 128 + signal.SIGHUP, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """The end of one rank.

    `exit_code` is negative for a signal, as in `subprocess`. `sent` is the last signal that the
    launcher had sent before the rank ended, `sent_at` when it sent the first. `time` (seconds since the epoch) is when
    the exception was recorded, or else when the rank was last seen alive: see [Note: who failed first]. `last_words` is
    what the rank was doing when it last told the others. `wanted` is the exit code of a `SystemExit` or a
    `KeyboardInterrupt` that was recorded, and `blames` are the ranks that the exception says were at fault.
    """

    rank: int
    exit_code: int
    sent: signal.Signals | None
    time: float
    summary: str = ""
    traceback: str = ""
    recorded: bool = False
    last_words: str = ""
    sent_at: float = math.inf
    wanted: int | None = None
    blames: tuple[int, ...] = ()
    batch: str = ""
    """Which samples a rank that raised had, in words, if it knew."""

    @property
    def failed(self) -> bool:
        """Whether the rank went wrong by itself, rather than because the launcher ended it."""
        if self.wanted is not None:
            return self.time < self.sent_at or self.wanted not in (0, *_STOPPED)
        if self.recorded:
            # whatever we sent came later, unless the script itself answered it with sys.exit(128 + n)
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
        """Whether its script was over, and well, before anybody asked it to end."""
        return self.exit_code == 0 and self.sent is None

    @property
    def status(self) -> int:
        """The exit status a shell would show for the failure itself.

        A rank that raised may have been ended by us on its way out, or by native code that was not
        shut down in order (gloo's threads abort at times): Python's own 1 is what is meant. So it is with the code
        that was given to `sys.exit`.
        """
        if self.wanted is not None:
            return self.wanted
        if self.raised or self.ended_early:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


# [Note: who failed first]
# When one rank dies, its peers fail within milliseconds because their connection to it broke. A
# rank that raises records the moment itself. One that is killed cannot: the launcher only sees it
# dead at the next look. Taking the last look at which it was alive errs towards blaming it, which
# is right: being killed is seldom the consequence of a peer's exception, and the reverse is common.
#
# A rank that raises our FaultError says which ranks were at fault. If one of those failed by itself too, it is the
# first, whatever the clocks say; so it is if its script came to its end while the others needed it.
def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The rank that failed by itself before any other, or left the others without failing; None when none did."""
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    first = min((one for one in by_rank.values() if one.failed), key=lambda one: one.time, default=None)
    if first is None or first.rank in first.blames:
        return first
    blamed = [by_rank[rank] for rank in first.blames if rank in by_rank]
    guilty = [one for one in blamed if one.failed] or [one for one in blamed if one.ended_early]
    return min(guilty, key=lambda one: one.time, default=first)


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
            blames=tuple(int(blamed) for blamed in details.get("blames", ())),
            batch=str(details.get("batch", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # none, or written by something else than us: what is left is how the process ended
        return Outcome(rank, exit_code, sent, last_alive, traceback=stack, sent_at=sent_at)
