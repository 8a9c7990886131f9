"""Collects how ranks ended and has the cause classified, for the launcher's report and the run record."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from shardwise.elastic.causes import Cause, Classifier, Disconnection
from shardwise.elastic.failure_signatures import End
from shardwise.launch.elastic.job_notes import Notes
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.outcome import Outcome

OVERDUE_SECONDS = 10.0
"""How long the ranks may take to form a new group before the launcher says why there is none."""
_UNREACHED = "kept the others waiting", "did not answer", "did not rejoin"


class EndedRanks:
    """Collects how ranks ended until it is known which ones continue."""

    def __init__(self, classifier: Classifier, notes: Notes, clock: Callable[[], float] = time.monotonic) -> None:
        self._classifier = classifier
        self.attach(notes, clock)
        self._ends: list[End] = []
        self._left_out: list[int] = []

    def __getstate__(self) -> dict[str, object]:
        """All but what the launcher's process has to give: see `attach`."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_notes", "_clock")}

    def attach(self, notes: Notes, clock: Callable[[], float]) -> None:
        """Restore what is not written down."""
        self._notes, self._clock = notes, clock

    def add(
        self,
        outcome: Outcome,
        rank: int,
        step: int,
        reason: str = "",
        *,
        host: str = "",
        ran_out: bool = False,
        is_new: bool = False,
    ) -> None:
        """Add a lost rank. `reason`: why the launcher ended it, if it did. `host`: its host, in a job of several.
        `ran_out`: the kernel has killed a process there, out of memory. `is_new`: see `End`."""
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
            is_new=is_new,
            at=outcome.time,
        )
        self._ends.append(end)

    def classify(self, num_ranks: int, step: int) -> Cause | None:
        """The cause of all losses added since the last call, also written to the run record; `None` without losses."""
        if not self._ends:
            return None
        if self._notes.skips():
            self._classifier.policy = replace(self._classifier.policy, data="skip")
        cause = self._classifier.classify(self._ends, num_ranks, self._clock())
        self._ends = []
        if cause.action == "skip":
            self._left_out.append(step)
            self._notes.leave_out(self._left_out)
        self._record(cause, step)
        return cause

    def classify_disconnection(self, cut: Disconnection, can_spare: Callable[[str], bool], now: float) -> Cause:
        """The cause of a fault in which nobody was lost, also written to the run record."""
        cause = self._classifier.classify_disconnection(cut, now, can_spare)
        self._record(cause, cut.step)
        return cause

    def _record(self, cause: Cause, step: int) -> None:
        line = {"kind": "fault", "step": max(0, step), "time": time.time(), "host": socket.gethostname()}
        self._notes.record({**line, **cause.record()})

    def classify_all(self, outcomes: Sequence[Outcome], step: int) -> Cause | None:
        """The cause of a job's end, from the outcomes of its last ranks."""
        added = {end.rank for end in self._ends}
        for outcome in outcomes:
            if outcome.failed and outcome.rank not in added:
                self.add(outcome, outcome.rank, step)
        return self.classify(len(outcomes), step)


class BeforeJoining:
    """Processes of one attempt that failed before its first generation. If all raise the same, such as an
    `ImportError`, replacements would raise it too."""

    def __init__(self, ended_ranks: EndedRanks) -> None:
        self._ended_ranks = ended_ranks
        self._started: set[int] = set()
        """The processes that had been started when the first one failed: later ones are replacements."""
        self._failed: dict[int, Outcome] = {}

    def failed(self, number: int, outcome: Outcome, started: Iterable[int]) -> Cause | None:
        """Add a failure; `started` are all processes of the attempt. Returns the cause once all failed alike."""
        self._started = self._started or set(started)
        self._failed[number] = outcome
        ends = [self._failed[one] for one in sorted(self._started) if one in self._failed]
        alike = {one.summary for one in ends}
        if len(ends) < max(2, len(self._started)) or len(alike) > 1 or not all(one.raised for one in ends):
            return None
        return self._ended_ranks.classify_all([replace(one, rank=rank) for rank, one in enumerate(ends)], 0)


class PendingCause:
    """The cause that has not been reported yet, and the hosts that it excludes."""

    def __init__(self, ended_ranks: EndedRanks, slots: Slots, exclude_seconds: float) -> None:
        self._ended_ranks, self._slots, self._exclude_seconds = ended_ranks, slots, exclude_seconds
        self._cause: Cause | None = None
        self._since = 0.0
        self._is_told = False

    def classify(self, num_ranks: int, step: int, now: float) -> None:
        """Classify the losses added since the last call, and exclude hosts if that is the action."""
        cause = self._ended_ranks.classify(num_ranks, step)
        if cause is not None:
            self._add(cause, now)

    def disconnected(self, cut: Disconnection, can_spare: Callable[[str], bool], now: float) -> Cause:
        """Classify a fault in which nobody was lost, and exclude hosts if that is the action."""
        cause = self._ended_ranks.classify_disconnection(cut, can_spare, now)
        self._add(cause, now)
        return cause

    def _add(self, cause: Cause, now: float) -> None:
        if cause.action == "exclude":
            for host in cause.hosts:
                self._slots.exclude(host, now + self._exclude_seconds)
        if self._cause is None:
            self._since, self._is_told = now, False
        if self._cause is None or cause.action in ("stop", "exclude"):
            self._cause = cause

    def take(self) -> Cause | None:
        """Return the cause to report, once."""
        cause, self._cause = self._cause, None
        return cause

    def overdue(self, now: float) -> str:
        """A report of a fault after which no new group has been formed for a while, as when a network stays down; empty
        if there is none, or it has been reported."""
        seconds = now - self._since
        if self._cause is None or self._is_told or seconds < OVERDUE_SECONDS:
            return ""
        self._is_told = True
        why = f"{self._cause.kind}: {self._cause.evidence}"
        return f"the ranks have not formed a new group for {seconds:.0f} s. Cause: {why}"

    def at_end(self, outcomes: Sequence[Outcome], step: int) -> list[Cause]:
        """The causes to report if the job ends: of a fault after which no group was formed, and of its last ranks'
        ends."""
        first, last = self.take(), self._ended_ranks.classify_all(outcomes, step)
        return [cause for cause in (first, last) if cause is not None]

    def excluded(self, cause: Cause | None) -> str:
        """A sentence about the hosts that a cause excludes, and for how long; empty if there are none."""
        if cause is None or cause.action != "exclude" or not cause.hosts:
            return ""
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._exclude_seconds))
        hosts = ", ".join(cause.hosts)
        return f"No process is started on {hosts} for {self._exclude_seconds:g} s (until {until})."
