"""Collects how processes ended and has the cause judged, for the launcher's report and the run record."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwise.elastic.blame import Blame, Judge
from shardwise.elastic.signs import End
from shardwise.launch.elastic.notes import Notes
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.outcome import Outcome

_UNREACHED = "kept the others waiting", "did not answer", "did not come"


class Blaming:
    """Collects how ranks ended until it is known which ones continue."""

    def __init__(self, judge: Judge, notes: Notes) -> None:
        self._judge = judge
        self._notes = notes
        self._ends: list[End] = []
        self._left_out: list[int] = []

    def note(
        self, outcome: Outcome, rank: int, step: int, reason: str = "", *, host: str = "", ran_out: bool = False
    ) -> None:
        """A rank is lost. `reason`: why the launcher ended it, if it did. `host`: its host, in a job of several.
        `ran_out`: the kernel has killed a process there, out of memory."""
        lines = outcome.summary.strip().splitlines()
        is_lost = bool(outcome.lost_with)
        end = End(
            rank,
            host,
            exit_code=-signal.SIGSTOP if "was stopped" in reason else outcome.exit_code,
            error=lines[0] if outcome.raised and lines else "",
            text=outcome.lost_with or reason or outcome.traceback,
            step=step,
            batch=outcome.batch,
            ran_out=ran_out and outcome.exit_code == -signal.SIGKILL and not reason and not is_lost,
            is_alive=is_lost or reason.startswith(_UNREACHED),
            at=outcome.time,
        )
        self._ends.append(end)

    def conclude(self, num_ranks: int, step: int) -> Blame | None:
        """The verdict on all losses noted since the last call, also written to the run record; `None` if none were."""
        if not self._ends:
            return None
        if self._notes.skips():
            self._judge.policy = replace(self._judge.policy, data="skip")
        verdict = self._judge.judge(self._ends, num_ranks, time.monotonic())
        self._ends = []
        if verdict.action == "skip":
            self._left_out.append(step)
            self._notes.leave_out(self._left_out)
        line = {"kind": "fault", "step": max(0, step), "time": time.time(), "host": socket.gethostname()}
        self._notes.record({**line, **verdict.record()})
        return verdict

    def conclude_all(self, outcomes: Sequence[Outcome], step: int) -> Blame | None:
        """The verdict on the end of a job, from the outcomes of its last ranks."""
        noted = {end.rank for end in self._ends}
        for outcome in outcomes:
            if outcome.failed and outcome.rank not in noted:
                self.note(outcome, outcome.rank, step)
        return self.conclude(len(outcomes), step)


class BeforeJoining:
    """Processes of one attempt that failed before its first generation. If all raise the same, such as an
    `ImportError`, replacements would raise it too."""

    def __init__(self, blaming: Blaming) -> None:
        self._blaming = blaming
        self._awaited: set[int] = set()
        """The processes that had been started when the first one failed: later ones are replacements."""
        self._failed: dict[int, Outcome] = {}

    def failed(self, number: int, outcome: Outcome, started: Iterable[int]) -> Blame | None:
        """Note a failure; `started` are all processes of the attempt. Returns the verdict once all failed alike."""
        self._awaited = self._awaited or set(started)
        self._failed[number] = outcome
        ends = [self._failed[one] for one in sorted(self._awaited) if one in self._failed]
        alike = {one.summary for one in ends}
        if len(ends) < max(2, len(self._awaited)) or len(alike) > 1 or not all(one.raised for one in ends):
            return None
        return self._blaming.conclude_all([replace(one, rank=rank) for rank, one in enumerate(ends)], 0)


class Verdicts:
    """The verdict not yet reported, and its consequences for hosts."""

    def __init__(self, blaming: Blaming, slots: Slots, exclude_seconds: float) -> None:
        self._blaming, self._slots, self._exclude_seconds = blaming, slots, exclude_seconds
        self._verdict: Blame | None = None

    def judge(self, num_ranks: int, step: int, now: float) -> None:
        """Judge the losses noted since the last call, and exclude hosts if the verdict says so."""
        verdict = self._blaming.conclude(num_ranks, step)
        if verdict is not None and verdict.action == "exclude":
            for host in verdict.hosts:
                self._slots.exclude(host, now + self._exclude_seconds)
        if self._verdict is None or (verdict is not None and verdict.action in ("stop", "exclude")):
            self._verdict = verdict

    def take(self) -> Blame | None:
        """Return the verdict to report, once."""
        verdict, self._verdict = self._verdict, None
        return verdict

    def excluded(self, verdict: Blame | None) -> str:
        """A sentence about the hosts that a verdict excludes, and for how long; empty if there are none."""
        if verdict is None or verdict.action != "exclude" or not verdict.hosts:
            return ""
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._exclude_seconds))
        hosts = ", ".join(verdict.hosts)
        return f"No process is started on {hosts} for {self._exclude_seconds:g} s (until {until})."
