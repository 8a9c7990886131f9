"""The launcher's report about the end of a job: one for all ranks."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

from shardwise.launch.outcome import Outcome, first_failure
from shardwise.system.printable import printable

_INTERRUPT = "KeyboardInterrupt"
_HINTS = {
    "SIGKILL": " (out of memory? `dmesg` shows whether the kernel killed it)",
    "SIGBUS": " (shared memory full? see `df /dev/shm`)",
    "SIGSEGV": " (a crash in native code)",
    "SIGABRT": " (an abort in native code; its message is above)",
    "SIGILL": " (native code built for another processor?)",
}


def failure_summary(outcomes: list[Outcome], logs: Path | None = None) -> str:
    """Which rank failed first and how, its traceback, how the others ended, and where logs are."""
    first = first_failure(outcomes)
    if first is None:
        return "the job did not finish, and no rank reported why."
    code = f", with exit code {first.status}" if first.raised else ""
    if first.ended_early:
        parts = [
            f"rank {first.rank} of {len(outcomes)} ended early: its script was over, but the others still needed it."
        ]
    else:
        parts = [f"rank {first.rank} of {len(outcomes)} failed first{code}: it {describe_failure(first)}."]
    if first.last_status and not first.raised:
        parts.append(f"Last status: {first.last_status}.")
    if first.traceback.strip():
        parts.append(first.traceback.strip())
    others = [other for other in outcomes if other is not first]
    if others:
        parts.append("\n".join(_describe_ends(others)))
    if logs is not None:
        parts.append(f"The output of each rank is in {logs}.")
    return "\n\n".join(parts)


def restart_line(outcomes: list[Outcome], attempt: int, max_restarts: int, used: str = "", *, when: str = "") -> str:
    """Why the last attempt ended, and which one begins; `used` is how much of a budget that takes, if there is one.
    `when` says what ranks were doing when they lost one, if they have said so."""
    number = used or f"{attempt} of {max_restarts}"
    first = first_failure(outcomes)
    if first is None:
        return f"the ranks failed; attempt {number} begins."
    how = "ended early, but the others still needed it" if first.ended_early else describe_failure(first)
    why = f"rank {first.rank} of {len(outcomes)} {how}"
    return f"{why}{when and f', {when}'}; restart {number} begins."


def stop_line(outcomes: list[Outcome], received: signal.Signals, num_killed: int) -> str:
    """How the ranks ended after the launcher was asked to end."""
    if not outcomes:
        return f"ended by {received.name} before any rank was started."
    ended = len(outcomes) - num_killed
    killed = f", {num_killed} had to be killed" if num_killed else ""
    lines = [f"ended by {received.name}; {ended} of {len(outcomes)} ranks ended by themselves{killed}."]
    lines += _describe_ends([outcome for outcome in outcomes if outcome.failed])
    return "\n".join(lines)


def report_failure(outcomes: list[Outcome], logs: Path | None) -> int:
    """Print the report of a failure, and return the exit status."""
    say(failure_summary(outcomes, logs))
    return first_status(outcomes)


def first_status(outcomes: list[Outcome]) -> int:
    """The exit status of the rank that failed first."""
    first = first_failure(outcomes)
    return first.status if first else 1


def report_stop(outcomes: list[Outcome], num_killed: int, received: signal.Signals, logs: Path | None) -> int:
    """Print how ranks ended that were asked to, and return the exit status."""
    # if any rank ended by the signal, exceptions of its peers are a consequence: their connections broke
    if first_failure(outcomes) and not num_killed and not any(outcome.obeyed for outcome in outcomes):
        return report_failure(outcomes, logs)
    say(stop_line(outcomes, received, num_killed))
    # a closed terminal reaches ranks as SIGTERM, and so it counts
    return 128 + (signal.SIGTERM if received is signal.SIGHUP else received)


def say(text: str) -> None:
    """Print a status line on stderr."""
    try:
        print(f"shardwise: {printable(text)}", file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal is gone; the ranks must still be ended


def describe_failure(outcome: Outcome) -> str:
    """How a rank failed: 'raised ValueError: ... (exit code 1)', 'was killed by SIGKILL (...)'."""
    if outcome.lost_with:
        return f"was lost with its host ({outcome.lost_with})"
    if outcome.raised:
        return f"raised {_headline(outcome.summary)}"
    if outcome.wanted is not None:
        is_interrupt = outcome.summary.startswith(_INTERRUPT)
        return "was interrupted by SIGINT" if is_interrupt else f"ended with exit code {outcome.wanted}"
    if outcome.is_status_lost:
        return "ended without a record, so it was killed (by what is unknown: its first launcher had been killed too)"
    if outcome.exit_code < 0:
        name = _name(-outcome.exit_code)
        return f"was killed by {name}{'' if outcome.sent is not None else _HINTS.get(name, '')}"
    return f"ended with exit code {outcome.exit_code}"


def _describe_ends(outcomes: list[Outcome]) -> list[str]:
    """One line for all ranks that ended in the same way: the peers of a lost rank all raise the same error."""
    ranks: dict[str, list[int]] = {}
    for outcome in outcomes:
        ranks.setdefault(_describe_end(outcome), []).append(outcome.rank)
    return [f"{how_ended(of_them, text)}." for text, of_them in ranks.items()]


def listed(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0 to 6`, `ranks 0, 2`, of ranks in order."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    is_row = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    return "ranks " + (f"{ranks[0]} to {ranks[-1]}" if is_row else ", ".join(map(str, ranks)))


def how_ended(ranks: list[int], text: str) -> str:
    """Ranks in order, and how they ended: `rank 3 was ...`, `ranks 0 to 6 were ...`."""
    return f"{listed(ranks)} " + (text if len(ranks) == 1 else re.sub(r"^(then )?was ", r"\1were ", text))


def _describe_end(outcome: Outcome) -> str:
    """How a rank ended that was not the first to fail."""
    if outcome.failed:
        return f"then {describe_failure(outcome)}"
    if outcome.exit_code == 0:
        return "had finished" if outcome.sent is None else f"ended normally after {outcome.sent.name}"
    if outcome.sent is signal.SIGKILL:
        return "did not end when asked and had to be killed by the launcher"
    if outcome.sent is not None and outcome.obeyed:
        return f"was ended by the launcher ({outcome.sent.name})"
    sent = outcome.sent.name if outcome.sent else "no signal"
    if outcome.exit_code < 0:
        return f"was killed by {_name(-outcome.exit_code)} after the launcher's {sent}"
    return f"ended with exit code {outcome.exit_code} after the launcher's {sent}"


def _headline(summary: str) -> str:
    """The first line of an exception's text; of a syntax error the last line, with file and line number."""
    lines = summary.strip().splitlines() or [""]
    if lines[0].startswith('File "') and len(lines) > 1:
        return f"{lines[-1].rstrip('.')} ({lines[0].strip()})"
    return lines[0].rstrip(".")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
