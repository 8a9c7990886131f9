"""Ranks that a launcher has taken over from another one, and so are not its children."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.outcome import recorded_exit_code

_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class RankRecord:
    """What a launcher has written down about a rank. `exit_code` is `None` for one that was alive."""

    pid: int
    exit_code: int | None
    error_file: Path
    last_alive: float
    sent: signal.Signals | None = None
    sent_at: float = math.inf


class AdoptedProcess:
    """Like `subprocess.Popen`, for a process that another one has started.

    Its end is known at once, by a descriptor of the process, and its exit code by what it has recorded itself.
    """

    def __init__(self, pid: int | None, record: RankRecord) -> None:
        """`pid` is `None` for a rank that has ended."""
        self.pid = record.pid if pid is None else pid
        self.returncode = record.exit_code
        self.is_status_lost = False
        self._error_file, self._sent = record.error_file, record.sent
        self._descriptor = -1
        if pid is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self) -> int:
        while (code := self._ended(None)) is None:
            pass
        return code

    def send_signal(self, number: int) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def _ended(self, seconds: float | None) -> int | None:
        """The exit code, if the process ends within `seconds`."""
        if self.returncode is not None:
            return self.returncode
        if self._descriptor >= 0:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            os.close(self._descriptor)
            self._descriptor = -1
        code = recorded_exit_code(self._error_file)
        self.is_status_lost = code is None and self._sent is None
        if code is None:  # it has ended by what it was sent, or by what leaves no record
            code = -(self._sent or signal.SIGKILL)
        self.returncode = code
        return code


def find_ranks(run_id: str) -> dict[int, int]:
    """The living ranks of a job on this host, by the environment that its launchers have given them: process ids by
    member number. A rank leads its session; its children, which have the same environment, do not."""
    found = {}
    for pid, environment in _environments():
        if environment.get(b"TORCHELASTIC_RUN_ID") == run_id.encode() and b"SHARDWISE_MEMBER" in environment:
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(pid) == pid:
                    found[int(environment[b"SHARDWISE_MEMBER"])] = pid
    return found


def _environments() -> Iterator[tuple[int, dict[bytes, bytes]]]:
    for folder in _PROCESSES.iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):  # another user's, or gone
                lines = (folder / "environ").read_bytes().split(b"\0")
                yield int(folder.name), dict(line.split(b"=", 1) for line in lines if b"=" in line)
