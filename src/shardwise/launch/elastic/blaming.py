"""From what became of processes to a verdict: whose fault it was, for the letter and for the run's record."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.comm.generation import BAD_BATCH, LEFT_OUT, RECORD_PATH
from shardwise.elastic.blame import Blame, Judge
from shardwise.elastic.signs import End
from shardwise.launch.outcome import Outcome

_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")
_UNREACHED = "kept the others waiting", "did not answer", "did not come"


class Blaming:
    """Gathers how ranks ended until it is known who goes on."""

    def __init__(self, judge: Judge, folder: Path | None, oom_events: Path = _OOM_EVENTS) -> None:
        self._judge = judge
        self._folder = folder
        self._oom_events = oom_events
        self._num_oom = self._ooms()
        self._ends: list[End] = []
        self._left_out: list[int] = []

    def note(self, outcome: Outcome, rank: int, step: int, reason: str = "") -> None:
        """A rank is gone; `reason` is why it was ended, if the launcher did that."""
        self._ends.append(self._end(outcome, rank, step, reason))

    def conclude(self, num_ranks: int, step: int) -> Blame | None:
        """The verdict on all that was noted since the last, written to the record; `None` if nothing was."""
        if not self._ends:
            return None
        if self._skips():
            self._judge.policy = replace(self._judge.policy, data="skip")
        verdict = self._judge.judge(self._ends, num_ranks, time.monotonic())
        self._ends = []
        if verdict.action == "skip" and self._folder is not None:
            self._left_out.append(step)
            (self._folder / LEFT_OUT).write_text(json.dumps(self._left_out))
        self._write(verdict, step)
        return verdict

    def conclude_all(self, outcomes: Sequence[Outcome], step: int) -> Blame | None:
        """The verdict on the end of a job, by what became of its last ranks."""
        noted = {end.rank for end in self._ends}
        for outcome in outcomes:
            if outcome.failed and outcome.rank not in noted:
                self.note(outcome, outcome.rank, step)
        return self.conclude(len(outcomes), step)

    def _end(self, outcome: Outcome, rank: int, step: int, reason: str) -> End:
        lines = outcome.summary.strip().splitlines()
        code = -signal.SIGSTOP if "was stopped" in reason else outcome.exit_code
        num_oom = self._ooms()
        ran_out = outcome.exit_code == -signal.SIGKILL and not reason and num_oom > self._num_oom
        self._num_oom = num_oom
        return End(
            rank,
            exit_code=code,
            error=lines[0] if outcome.raised and lines else "",
            text=reason or outcome.traceback,
            step=step,
            batch=outcome.batch,
            ran_out=ran_out,
            is_alive=reason.startswith(_UNREACHED),
            at=outcome.time,
        )

    def _skips(self) -> bool:
        """Whether the plan has said so."""
        with contextlib.suppress(OSError):
            return self._folder is not None and (self._folder / BAD_BATCH).read_text() == "skip"
        return False

    def _ooms(self) -> int:
        """How many processes the kernel has killed for memory in this group, if it says."""
        with contextlib.suppress(OSError, ValueError):
            words = dict(line.split() for line in self._oom_events.read_text().splitlines())
            return int(words.get("oom_kill", 0))
        return 0

    def _write(self, verdict: Blame, step: int) -> None:
        """A line of the run's record, if there is one on this host."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # a record that cannot be written must not end a job
            path = Path((self._folder / RECORD_PATH).read_text())
            line = {"kind": "fault", "step": max(0, step), "time": time.time(), "host": socket.gethostname()}
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**line, **verdict.record()}) + "\n")
