"""A folder for what does not fit into memory: on a local disk, used by one job at a time, with room checked in advance.

[Note: who has the folder] Each rank locks a small file of its own in the folder, which names the process. The kernel
releases the lock (`flock`) when the process ends, however it ends, and the lock holds between containers, which do not
see each other's processes. Children that a process forks keep its lock and its files: while one of them lives, the
space stays in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import CheckpointError, StateError, TierError
from shardwise.safe_files import read_own_text
from shardwise.tiers.align import up
from shardwise.tiers.calls import SYSTEM, Calls
from shardwise.tiers.disk_file import DiskFile
from shardwise.tiers.faults import folder_fault
from shardwise.tiers.holder import Holder
from shardwise.tiers.io_queue import IoQueue
from shardwise.tiers.mounts import check_local
from shardwise.units import format_bytes

MAX_LOCK_BYTES = 4096
_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class LeftBehind:
    """A killed process whose files in a folder were removed."""

    holder: Holder
    num_bytes: int
    """Of the files that still had names."""


class TierFolder:
    """One rank's right to keep files in `folder`, until `close`.

    Raises `TierError` if the folder cannot be written to, is on a network file system, or belongs to another job.
    """

    def __init__(self, folder: Path | str, *, rank: int = 0, calls: Calls = SYSTEM, mounts: str | None = None) -> None:
        """`rank` is this process's rank in its job. `mounts` replaces the content of `/proc/self/mounts`, for tests."""
        self.folder = Path(folder)
        self._calls = calls
        self._prefix = f"shardwise-rank-{rank}"
        self._files: list[DiskFile] = []
        self._lock, self._is_cached = threading.Lock(), False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise folder_fault(f"The folder {self.folder} cannot be made", error) from error
        warning = check_local(self.folder, mounts)
        if warning:
            _log.warning(warning)
        self._path = self.folder / f"{self._prefix}.lock"
        handle, before = self._take()
        self.left_behind = self._remove_leftovers(before)
        self._release = weakref.finalize(self, _release, handle, self._path, os.getpid())  # also at interpreter exit

    def check_room(self, num_bytes: int) -> None:
        """Raise `TierError` unless `num_bytes` more are free."""
        free = self._calls.free_bytes(self.folder)
        if num_bytes > free:
            raise TierError(
                f"{self.folder} has {format_bytes(free)} free, and {format_bytes(num_bytes)} are needed: "
                f"{format_bytes(num_bytes - free)} too little. Make room there, or name a folder on a larger disk."
            )

    def create(self, name: str, num_bytes: int, queue: IoQueue, *, checksums: bool = False) -> DiskFile:
        """A file of `num_bytes` whose space is allocated at once; `TierError` if there is not enough.

        `name` is a plain file name, and also used in messages.
        """
        if not self._release.alive:
            raise StateError(f"{self.folder} has been given up; make another TierFolder.")
        self.check_room(up(num_bytes))
        path = self.folder / f"{self._prefix}.{name}"
        file = DiskFile(path, num_bytes, queue, checksums=checksums, calls=self._calls, when_cached=self._warn_cached)
        self._files.append(file)
        return file

    def tidy_after_others(self) -> None:
        """Remove what killed processes of other ranks have left here. Call it once all ranks of this job hold the
        folder."""
        for path in self.folder.glob("shardwise-rank-*.lock"):
            if path != self._path:
                with contextlib.suppress(OSError):  # its process lives, or another rank is removing it
                    _remove_unless_held(path)

    def close(self) -> None:
        """Close the files and release the folder. May be called twice."""
        for file in self._files:
            file.close()
        self._files = []
        self._release()

    def _warn_cached(self) -> None:
        """Warn once; called by files, from I/O threads."""
        with self._lock:
            if self._is_cached:
                return
            self._is_cached = True
        _log.warning(
            "%s is read and written through the page cache: its file system refuses direct I/O. That takes memory for "
            "the cache and time for copies; a folder on ext4 or xfs on a local disk does not.",
            self.folder,
        )

    def _take(self) -> tuple[int, Holder | None]:
        """Lock this rank's file and write this process's name into it. A name found there is of a process that was
        killed."""
        for _ in range(10):
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise folder_fault(f"The folder {self.folder} cannot be written to", error) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                raise TierError(
                    f"{self.folder} is being used by {self._named() or 'a process that does not say which'}. Two jobs "
                    f"cannot share a folder: end the other one, or give this one a folder of its own."
                ) from None
            except OSError as error:
                os.close(handle)
                raise folder_fault(f"{self._path} cannot be locked", error) from error
            if _is_at(handle, self._path):
                before = self._named()
                os.ftruncate(handle, 0)
                os.pwrite(handle, json.dumps(asdict(Holder.me())).encode(), 0)
                return handle, before
            os.close(handle)  # its holder removed it between our open and our lock
        raise TierError(f"{self._path} keeps changing. Do several jobs use this folder?")

    def _named(self) -> Holder | None:
        try:
            return Holder.read(json.loads(read_own_text(self._path, MAX_LOCK_BYTES)))
        except (OSError, ValueError, TypeError, KeyError, CheckpointError):
            return None

    def _remove_leftovers(self, before: Holder | None) -> LeftBehind | None:
        """Remove files with this rank's prefix whose process is gone."""
        num_bytes = 0
        leftovers = [path for path in self.folder.glob(f"{self._prefix}.*") if path != self._path]
        for path in leftovers:
            with contextlib.suppress(OSError):  # it belongs to nobody, and only a file of the same name would conflict
                size = path.lstat().st_size
                path.unlink()
                num_bytes += size
        if before is None and not leftovers:
            return None
        left = LeftBehind(before or Holder("an unknown host", 0, 0.0), num_bytes)
        _log.warning("%s was left by %s, which was killed; it is used again.", self.folder, left.holder)
        return left


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def _remove_unless_held(path: Path) -> None:
    """Remove a rank's lock file and those of its files that still have names. Raises `OSError` if its process lives."""
    handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(handle, path):
            for left in path.parent.glob(f"{path.stem}.*"):
                if left != path:
                    left.unlink()
            path.unlink()
    finally:
        os.close(handle)


def _release(handle: int, path: Path, owner: int) -> None:
    if os.getpid() == owner and _is_at(handle, path):  # a fork's copy must not unlink its parent's file
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(handle)
