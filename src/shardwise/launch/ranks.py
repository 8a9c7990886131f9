"""The processes of one attempt: started together, watched, ended together.

[Note: ranks that do not end] A process that waits in the kernel for a device, such as a disk that answers nothing, ends
only when that does, even if it was killed. It does nothing more, so nobody waits for it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from shardwise.launch.adopted import AdoptedProcess, RankRecord
from shardwise.launch.outcome import ENDED, Outcome, read_outcome

POLL_SECONDS = 0.05
STUCK_SECONDS = 10.0
"""After which a rank that was killed and does not end is taken for ended: see [Note: ranks that do not end]."""


class RankProcess(Protocol):
    """A rank's process; `returncode` is that of the last `poll` or `wait`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


@dataclass
class _Rank:
    process: RankProcess
    error_file: Path
    last_alive: float
    sent: signal.Signals | None = None
    sent_at: float = math.inf
    killed_at: float = math.inf
    recorded_at: float = math.inf
    """When a failure that it has recorded was first seen. By a clock that nobody sets: the file may be on a server
    whose clock is another."""

    @property
    def alive(self) -> bool:
        return self.code is None

    @property
    def code(self) -> int | None:
        """The exit code, once it has ended, or is taken for ended."""
        code = self.process.poll()
        return -signal.SIGKILL if code is None and self.is_stuck else code

    @property
    def is_stuck(self) -> bool:
        return time.monotonic() > self.killed_at + STUCK_SECONDS

    def lingers(self, patience_seconds: float) -> bool:
        """Whether it has recorded a failure, and still not ended after `patience_seconds`."""
        if not self.alive or not self.error_file.exists():
            return False
        now = time.monotonic()
        self.recorded_at = min(self.recorded_at, now)
        return now > self.recorded_at + patience_seconds

    def kill(self) -> None:
        if self.alive:
            self.sent, self.sent_at = signal.SIGKILL, min(self.sent_at, time.time())
            self.killed_at = min(self.killed_at, time.monotonic())
        kill_session(self.process.pid)


@dataclass
class RankFiles:
    """Where a rank's records go; `stdout` and `stderr` are None if it shares the launcher's."""

    error: Path
    stdout: Path | None = None
    stderr: Path | None = None

    @classmethod
    def with_output(cls, error: Path) -> RankFiles:
        """Of a rank whose output goes to files beside `error`."""
        return cls(error, error.with_name("stdout.log"), error.with_name("stderr.log"))

    def prepare(self) -> None:
        """Create the directory, and remove files of an earlier run."""
        self.error.parent.mkdir(parents=True, exist_ok=True)
        for stale in (self.error, Path(f"{self.error}.fault"), Path(f"{self.error}{ENDED}")):
            stale.unlink(missing_ok=True)


@dataclass
class Ranks:
    """All ranks of one attempt. Not thread-safe; its owner calls `kill` at the end.

    Start ranks from a thread that outlives them: the kernel kills a rank with the thread that started it.
    """

    _ranks: list[_Rank] = field(default_factory=list)

    def start(self, command: list[str], environment: Mapping[str, str], files: RankFiles) -> int:
        """Start the next rank and return its process id."""
        files.prepare()
        out, err = _open(files.stdout), _open(files.stderr)
        try:
            # a session of its own: Ctrl-C in the terminal reaches only the launcher, which passes it on once
            process = subprocess.Popen(command, env={**environment}, stdout=out, stderr=err, start_new_session=True)
        finally:
            for stream in (out, err):
                if stream is not None:
                    stream.close()
        self._ranks.append(_Rank(process, files.error, time.time()))
        return process.pid

    def records(self) -> list[RankRecord]:
        """What a launcher that takes over needs to know about the ranks, in the order of their starts."""
        return [
            RankRecord(rank.process.pid, rank.process.poll(), rank.error_file, rank.last_alive, rank.sent, rank.sent_at)
            for rank in self._ranks
        ]

    def adopt(self, records: Sequence[RankRecord], found: Mapping[int, int]) -> None:
        """Take over the ranks of a launcher that was killed. `found` are those that live: their process ids."""
        for number, record in enumerate(records):
            process = AdoptedProcess(found.get(number), record)
            self._ranks.append(_Rank(process, record.error_file, record.last_alive, record.sent, record.sent_at))

    def any_alive(self) -> bool:
        """Poll every rank, and note the time for those that are alive."""
        now = time.time()
        living = [rank for rank in self._ranks if rank.alive]
        for rank in living:
            rank.last_alive = now
        return bool(living)

    def any_failed(self, patience_seconds: float) -> bool:
        """Whether a rank ended with anything but 0, or recorded a failure and still has not ended.

        The latter happens when the main thread has raised and another thread goes on; a peer would then wait until its
        timeout. To be asked again and again.
        """
        if any(rank.process.returncode for rank in self._ranks):
            return True
        linger = [rank.lingers(patience_seconds) for rank in self._ranks]  # all: each notes when that was first seen
        return any(linger)

    def ended_and_living(self) -> tuple[list[int], list[int]]:
        """The ranks that have ended with 0, and those that are alive."""
        codes = {number: rank.process.poll() for number, rank in enumerate(self._ranks)}
        return [n for n, code in codes.items() if code == 0], [n for n, code in codes.items() if code is None]

    def pid(self, number: int) -> int:
        return self._ranks[number].process.pid

    def code(self, number: int) -> int | None:
        """A rank's exit code, once it has ended."""
        return self._ranks[number].code

    def outcome(self, number: int) -> Outcome:
        """The outcome of a rank that has ended."""
        rank = self._ranks[number]
        code = rank.code if rank.is_stuck else rank.process.wait()
        assert code is not None
        outcome = read_outcome(number, code, rank.sent, rank.last_alive, rank.error_file, rank.sent_at)
        is_lost = isinstance(rank.process, AdoptedProcess) and rank.process.is_status_lost
        return replace(outcome, is_status_lost=is_lost)

    def kill_one(self, number: int) -> None:
        """Kill one rank, with all its children."""
        self._ranks[number].kill()

    def lingers(self, number: int, patience_seconds: float) -> bool:
        """See `_Rank.lingers`. To be asked again and again."""
        return self._ranks[number].lingers(patience_seconds)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each living rank, but not to its children, which it may need to end cleanly."""
        for rank in self._ranks:
            if rank.alive:
                rank.sent, rank.sent_at = number, min(rank.sent_at, time.time())
                rank.process.send_signal(number)

    def wait(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Wait until all have ended, `seconds` have passed, or `hurry()` is true."""
        deadline = time.monotonic() + seconds
        while self.any_alive() and time.monotonic() < deadline and not hurry():
            time.sleep(POLL_SECONDS / 5)

    def kill(self) -> int:
        """Kill whatever is left, with all children, and return how many ranks had to be killed.

        Call it once the job is failing or over; may be called again.
        """
        living = [rank for rank in self._ranks if rank.alive]
        for rank in living:
            rank.kill()
        while any(rank.alive for rank in living):
            time.sleep(POLL_SECONDS / 5)
        return len(living)

    def kill_children(self) -> None:
        """Kill processes left behind by ranks that failed or were ended; call it soon after."""
        for rank in self._ranks:
            if rank.process.returncode:
                kill_session(rank.process.pid)

    def outcomes(self) -> list[Outcome]:
        """The outcome of each rank; all must have ended."""
        return [self.outcome(number) for number in range(len(self._ranks))]


def _open(path: Path | None) -> IO[bytes] | None:
    return None if path is None else path.open("wb")


def kill_session(pid: int) -> None:
    """Kill a process and its children."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the session is empty
