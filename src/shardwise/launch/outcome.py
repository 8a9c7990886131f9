"""What became of each rank, and which of them failed first."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """The end of one rank.

    `exit_code` is negative for a signal, as in `subprocess`. `sent` is the last signal that the
    launcher had sent before the rank ended. `time` (seconds since the epoch) is when the exception
    was recorded, or else when the rank was last seen alive: see [Note: who failed first]. `last_words` is
    what the rank was doing when it last told the others.
    """

    rank: int
    exit_code: int
    sent: signal.Signals | None
    time: float
    summary: str = ""
    traceback: str = ""
    recorded: bool = False
    last_words: str = ""

    @property
    def failed(self) -> bool:
        """Whether the rank went wrong by itself, rather than because the launcher ended it."""
        if self.recorded:
            # whatever we sent came later, unless the script itself answered it with sys.exit(128 + n)
            return self.sent is None or self.exit_code != 128 + self.sent
        return self.exit_code != 0 and self.sent is None

    @property
    def raised(self) -> bool:
        """Whether it ended with an exception, rather than with sys.exit or a signal."""
        return self.recorded and not self.summary.startswith("SystemExit")

    @property
    def obeyed(self) -> bool:
        """Whether it ended the way a process ends that was sent a signal."""
        return self.sent is not None and self.exit_code in (-self.sent, 128 + self.sent)

    @property
    def status(self) -> int:
        """The exit status a shell would show for the failure itself.

        A rank that raised may have been ended by us on its way out, or by native code that was not
        shut down in order (gloo's threads abort at times): Python's own 1 is what is meant.
        """
        if self.raised:
            return 1
        return 128 - self.exit_code if self.exit_code < 0 else self.exit_code


# [Note: who failed first]
# When one rank dies, its peers fail within milliseconds because their connection to it broke. A
# rank that raises records the moment itself. One that is killed cannot: the launcher only sees it
# dead at the next look. Taking the last look at which it was alive errs towards blaming it, which
# is right: being killed is seldom the consequence of a peer's exception, and the reverse is common.
def first_failure(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The rank that failed by itself before any other; None when none did."""
    failures = [outcome for outcome in outcomes if outcome.failed]
    return min(failures, key=lambda outcome: outcome.time, default=None)


def read_outcome(
    rank: int, exit_code: int, sent: signal.Signals | None, last_alive: float, error_file: Path
) -> Outcome:
    """The outcome of a rank that has ended, with what it left in its error file."""
    fault = Path(f"{error_file}.fault")
    stack = fault.read_text(errors="replace") if fault.exists() else ""
    try:
        message = json.loads(error_file.read_text())["message"]
        details = message["extraInfo"]
        time = float(details.get("time", details["timestamp"]))
        summary, trace = str(message["message"]), str(details["py_callstack"])
    except (OSError, ValueError, KeyError, TypeError):
        # none, or written by something else than us: what is left is how the process ended
        return Outcome(rank, exit_code, sent, last_alive, traceback=stack)
    return Outcome(rank, exit_code, sent, time, summary, trace, recorded=True)
