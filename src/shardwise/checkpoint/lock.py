"""Makes sure that one job at a time writes into a folder of checkpoints.

[Note: whose folder] A small file names the host, the process and the time when that process began. If the process is
gone from this host, it left the file behind, and the lock is taken over. It is also taken over from another host,
because it cannot be known here whether that process is alive, and a job that was moved to another machine must be able
to go on. If the other process is alive after all, it finds before it next publishes that it no longer holds the folder,
and raises. Either way, at most one of two jobs publishes.

[Note: the folder of an elastic job] Rank 0 holds it for all. When its replica group has lost a rank, it lives on as a
spare, and another rank is the first. So the file also says which job on this host its process is of, and a rank of the
same one takes the lock over.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.system.disk import Holder
from shardwise.system.safe_files import draft_beside, read_own_text

LOCK = ".lock"
MAX_LOCK_BYTES = 4096


class FolderLock:
    """The right to write into `folder`, held by this process; see [Note: whose folder].

    `job` is what all processes of an elastic job have in common on this host, and of no other job; else empty.
    """

    def __init__(self, folder: Path, job: str = "") -> None:
        self._folder = folder
        self._job = job
        self._path = folder / LOCK
        self._me = Holder.me()

    def acquire(self) -> bool:
        """Take the lock, or raise `CheckpointError` naming its holder. Returns whether this process did not hold it
        before."""
        for _ in range(10):
            holder = self._holder()
            if self._me.is_same(holder):
                return False
            if holder is not None:
                if not holder.is_gone() and not self.is_passed_on():
                    raise CheckpointError(
                        f"{self._folder} is being written to by {holder}. Two jobs cannot share a folder of "
                        f"checkpoints: end the other one, or give this one a folder of its own."
                    )
                with contextlib.suppress(FileNotFoundError):
                    self._path.unlink()
            if self._make():
                return True
        raise CheckpointError(f"{self._path} keeps changing. Do several jobs write into this folder?")

    def check(self) -> None:
        """Raise `CheckpointError` unless this process still holds the lock. If there is no holder, because the file or
        the folder was removed, take it again."""
        holder = self._holder()
        if holder is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.acquire()
            return
        if self.is_passed_on():
            raise CheckpointError(
                f"{self._folder} is written to by {holder} now, the first of the ranks of this job that went on when "
                f"others were lost."
            )
        if not self._me.is_same(holder):
            raise CheckpointError(
                f"{self._folder} has been taken over by {holder}, so nothing more is written to it "
                f"from here. End one of the two jobs."
            )

    def release(self) -> None:
        with contextlib.suppress(OSError):
            if self._me.is_same(self._holder()):
                self._path.unlink()

    def is_passed_on(self) -> bool:
        """Whether another process of the same job holds it: see [Note: the folder of an elastic job]."""
        holder, job = self._named()
        return bool(self._job) and job == self._job and not self._me.is_same(holder)

    def _holder(self) -> Holder | None:
        return self._named()[0]

    def _named(self) -> tuple[Holder | None, str]:
        """The holder named by the file, and its job; `None` if there is no file. An unreadable file counts as an
        unknown holder."""
        try:
            content = json.loads(read_own_text(self._path, MAX_LOCK_BYTES))
            return Holder.read(content), str(content.get("job", ""))
        except FileNotFoundError:
            return None, ""
        except (ValueError, TypeError, KeyError, CheckpointError):
            return Holder("an unknown host", 0, 0.0), ""

    def _make(self) -> bool:
        """Create the file with its content atomically, as a link to a complete file. False if another process was
        faster."""
        mine = draft_beside(self._path)
        mine.write_text(json.dumps({**asdict(self._me), "job": self._job}))
        try:
            os.link(mine, self._path)
        except FileExistsError:
            return False
        except OSError:  # no hard links on this file system
            mine.replace(self._path)
            return True
        finally:
            mine.unlink(missing_ok=True)
        return True
