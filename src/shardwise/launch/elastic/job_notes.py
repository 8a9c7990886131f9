"""Files through which launcher and ranks communicate, in a folder that outlives ranks; and the kernel's OOM count.

Nothing here imports torch, since the agents on hosts do not.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from shardwise.system.job_folder import BAD_BATCH, LEFT_OUT, RECORD_PATH

_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")


class Notes(Protocol):
    """Access to the files through which launcher and ranks communicate."""

    def skips(self) -> bool:
        """Whether the plan skips bad batches."""
        ...

    def leave_out(self, steps: Sequence[int]) -> None:
        """Tell the next generation the steps whose batches are skipped."""
        ...

    def record(self, line: dict[str, object]) -> None:
        """Append a line to the run record, if there is one."""
        ...


class FolderNotes:
    """Notes in a folder of this host."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def skips(self) -> bool:
        with contextlib.suppress(OSError):
            return self._folder is not None and (self._folder / BAD_BATCH).read_text() == "skip"
        return False

    def leave_out(self, steps: Sequence[int]) -> None:
        if self._folder is not None:
            (self._folder / LEFT_OUT).write_text(json.dumps(list(steps)))

    def record(self, line: dict[str, object]) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # a record that cannot be written must not end a job
            path = Path(os.fsdecode((self._folder / RECORD_PATH).read_bytes()))
            with path.open("ab+") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - 1))
                is_torn = stream.read(1) not in (b"", b"\n")  # its writer was killed in the middle of a line
                stream.write(b"\n" * is_torn + json.dumps(line).encode() + b"\n")


class OomKills:
    """The kernel's count of out-of-memory kills in this cgroup, if there is one."""

    def __init__(self, events: Path = _OOM_EVENTS) -> None:
        self._events = events
        self._number = self._count()

    def has_risen(self) -> bool:
        """Whether there were more kills since the last call."""
        before, self._number = self._number, self._count()
        return self._number > before

    def _count(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            words = dict(line.split() for line in self._events.read_text().splitlines())
            return int(words.get("oom_kill", 0))
        return 0
