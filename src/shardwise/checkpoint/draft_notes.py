"""Rank 0's wait for the other ranks' notes in a draft; see [Note: agreement without messages] in `saver.py`.

[Note: a note that never comes] A rank that died leaves none. On this host its process is checked, so that the wait ends
at once. On another host all that can be seen from here is that files no longer grow; the limit for that is 5 minutes,
or a few seconds if the watchdog has found a fault between the ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from shardwise.checkpoint import folder as folders
from shardwise.comm import Journal
from shardwise.errors import CheckpointError
from shardwise.system.units import format_seconds

LOOK_SECONDS = 0.005, 0.1
"""Seconds between two checks for the others' notes, at first and after a while."""
AFTER_FAULT_SECONDS = 5


@dataclass(frozen=True)
class Writer:
    """The process of a rank. `place` is equal for processes that can see each other."""

    place: str
    pid: int
    began: float

    @classmethod
    def me(cls) -> Writer:
        return cls(_place(), os.getpid(), psutil.Process().create_time())

    def is_gone(self) -> bool:
        """Whether it has ended, as far as this process can see."""
        if self.place != _place():
            return False
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            return abs(process.create_time() - self.began) > 2  # another process with the same number
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


@functools.cache
def _place() -> str:
    """One boot of one system, and one process namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Notes:
    """Every rank's note about its file in `draft`. `writers` are the processes of the ranks."""

    def __init__(self, draft: Path, writers: Sequence[Writer], journal: Journal, timeout_seconds: float) -> None:
        self._draft = draft
        self._writers = writers
        self._journal = journal
        self._timeout_seconds = timeout_seconds

    def wait(self) -> list[dict[str, Any]]:
        """Every rank's note, by rank, including rank 0's. Raises `CheckpointError` if one will never come."""
        notes: dict[int, dict[str, Any]] = {}
        started, seen, pause = time.monotonic(), -1, LOOK_SECONDS[0]
        while True:
            gone = {rank for rank in self._missing(notes) if self._writers[rank].is_gone()}
            for rank in self._missing(notes):  # a note that a gone rank left is visible by now
                note = folders.read_note(self._draft, file_name(rank))
                if note is not None:
                    notes[rank] = note
            missing = self._missing(notes)
            if not missing:
                return [notes[rank] for rank in range(len(self._writers))]
            size = _bytes_in(self._draft)
            if size != seen:
                started, seen = time.monotonic(), size
            self._check(missing, gone, time.monotonic() - started)
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_SECONDS[1])

    def _missing(self, notes: dict[int, dict[str, Any]]) -> list[int]:
        return [rank for rank in range(len(self._writers)) if rank not in notes]

    def _check(self, missing: list[int], gone: set[int], still_seconds: float) -> None:
        """Raise `CheckpointError` if waiting is pointless."""
        for rank in gone.intersection(missing):
            raise CheckpointError(f"rank {rank} ended (killed?) before it had finished its file.")
        if not self._draft.is_dir():
            raise CheckpointError(f"the folder {self._draft} was removed while it was being written.")
        fault = self._journal.fault
        if fault is not None and still_seconds > min(AFTER_FAULT_SECONDS, self._timeout_seconds):
            raise CheckpointError(f"rank {missing[0]} has not finished its file, and: {fault.text}")
        if still_seconds > self._timeout_seconds:
            raise CheckpointError(
                f"rank {missing[0]} has not finished its file, and the file has not grown for "
                f"{format_seconds(self._timeout_seconds)}; has the rank ended?"
            )


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _bytes_in(draft: Path) -> int:
    with contextlib.suppress(OSError):
        every = [path.stat() for path in draft.iterdir()]
        return sum(one.st_size + 512 * one.st_blocks for one in every)  # files may have their full size from the start
    return 0
