"""A folder for what does not fit into memory: on a local disk, used by one job at a time, with room checked in advance.

[Note: who has the folder] Each rank locks a small file of its own in the folder, which names the process and the job.
The kernel releases the lock (`flock`) when the process ends, however it ends, and the lock holds between containers,
which do not see each other's processes. Children that a process forks keep its lock and its files: while one of them
lives, the space stays in use.

A job is known by a number that rank 0 draws and all ranks write into their files. Once all of them hold the folder,
each looks at every other lock that is held: another number there is another job, whatever its ranks' numbers are. Of
two jobs that come at once, at least one finds the other.

Unlike the lock of checkpoints, whose folder may be anywhere, this one may rely on `flock`: a tier is on this machine.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import threading
import time
import weakref
from dataclasses import asdict
from functools import cache
from pathlib import Path

from shardwise.errors import CheckpointError, StateError, TierError
from shardwise.system.disk.align import PAGE
from shardwise.system.disk.calls import SYSTEM, Calls
from shardwise.system.disk.disk_file import DiskFile
from shardwise.system.disk.faults import folder_fault
from shardwise.system.disk.holder import Holder
from shardwise.system.disk.io_queue import IoQueue
from shardwise.system.disk.mounts import check_local
from shardwise.system.disk.pending import Patience
from shardwise.system.even_parts import round_up
from shardwise.system.safe_files import read_own_text
from shardwise.system.units import format_bytes

MAX_LOCK_BYTES = 4096
NUM_TRIES = 25
TRY_SECONDS = 0.02
"""A lock may be held for a moment by a rank that only looks whether somebody has it."""
_log = logging.getLogger("shardwise")


def job_of_process() -> str:
    """A number for the job whose rank 0 this process is; other ranks are told it."""
    return _number_of(os.getpid())


@cache
def _number_of(pid: int) -> str:
    """Drawn once in each process, and again in one that was forked."""
    return f"{pid}-{secrets.token_hex(8)}"


class TierFolder:
    """One rank's right to keep files in `folder`, until `close`.

    Raises `TierError` if the folder cannot be written to, is on a network file system, or belongs to another job.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        rank: int = 0,
        job: str | None = None,
        patience: Patience | None = None,
        calls: Calls = SYSTEM,
        mounts: str | None = None,
    ) -> None:
        """`rank` is this process's rank in `job`, which is the same for all of its ranks; `None` for a job of this
        process alone. `patience` is that with the folder's disk: once that is given up, the folder is not touched any
        more. `mounts` replaces the content of `/proc/self/mounts`, for tests."""
        self.folder = Path(os.path.abspath(folder))  # a job may change its working directory
        self.job = job_of_process() if job is None else job
        """The number of the job that has the folder."""
        self._calls = calls
        self._prefix = f"shardwise-rank-{rank}"
        self._files: weakref.WeakSet[DiskFile] = weakref.WeakSet()
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
        self._remove_leftovers(before)
        patience = Patience() if patience is None else patience
        self._release = weakref.finalize(self, _release, handle, self._path, os.getpid(), patience)  # also at exit

    def check_room(self, num_bytes: int) -> None:
        """Raise `TierError` unless `num_bytes` more are free."""
        try:
            free = self._calls.free_bytes(self.folder)
        except OSError as error:
            raise folder_fault(f"The folder {self.folder} cannot be asked for its free space", error) from error
        if num_bytes > free:
            raise TierError(
                f"{self.folder} has {format_bytes(free)} free, and {format_bytes(num_bytes)} are needed: "
                f"{format_bytes(num_bytes - free)} too little. Make room there, or name a folder on a larger disk."
            )

    def create(
        self,
        name: str,
        num_bytes: int,
        queue: IoQueue,
        *,
        checksums: bool = False,
        cut: int = 0,
        is_named: bool = False,
    ) -> DiskFile:
        """A file of `num_bytes` whose space is allocated at once; `TierError` if there is not enough. For `checksums`
        and `cut` see `DiskFile`; one that `is_named` keeps its name, so that it outlives this process.

        `name` is a plain file name, and also used in messages.
        """
        if not self._release.alive:
            raise StateError(f"{self.folder} has been given up; make another TierFolder.")
        self.check_room(round_up(num_bytes, PAGE))
        file = DiskFile(
            self.folder / f"{self._prefix}.{name}",
            num_bytes,
            queue,
            checksums=checksums,
            cut=cut,
            life="job" if is_named else "process",
            calls=self._calls,
            when_cached=self._warn_cached,
        )
        self._files.add(file)
        return file

    def open(self, path: Path, num_bytes: int, queue: IoQueue) -> DiskFile:
        """The file of another process of this job, which is gone. Raises `TierError` if it cannot be opened."""
        file = DiskFile(path, num_bytes, queue, life="left", calls=self._calls, when_cached=self._warn_cached)
        self._files.add(file)
        return file

    def tidy_after_others(self) -> None:
        """Remove what killed processes of other ranks have left here. Call it once all ranks of this job hold the
        folder.

        Raises `TierError` if a rank of another job holds it too: see [Note: who has the folder].
        """
        for path in self.folder.glob("shardwise-rank-*.lock"):
            if path != self._path:
                self._tidy_after(path)
        for path in self.folder.glob("shardwise-rank-*.*"):  # of ranks that have ended, and kept them for others
            if not _lock_of(path).exists():
                path.unlink(missing_ok=True)

    def _tidy_after(self, path: Path) -> None:
        for number in range(NUM_TRIES):
            try:
                return _remove_unless_held(path)
            except BlockingIOError:
                job, holder = _read_lock(path)
                if job is None or job == self.job:
                    return None
                if number == NUM_TRIES - 1:
                    raise self._in_use_by(holder) from None
                time.sleep(TRY_SECONDS)  # another rank may be removing what a killed one has left
            except OSError:  # it has removed it
                return None
        return None

    def _in_use_by(self, holder: Holder | None) -> TierError:
        if holder is not None and holder.is_same(Holder.me()):
            return TierError(
                f"{self.folder} is being used by {holder}, which is this one. Close the engine that has it, or give "
                f"this one a folder of its own."
            )
        return TierError(
            f"{self.folder} is being used by {holder or 'a process that does not say which'}. Two jobs cannot share a "
            f"folder: end the other one, or give this one a folder of its own."
        )

    def close(self) -> None:
        """Close the files and release the folder. May be called twice."""
        for file in self._files:
            file.close()
        self._files.clear()
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
        for number in range(NUM_TRIES):
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise folder_fault(f"The folder {self.folder} cannot be written to", error) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                if number < NUM_TRIES - 1:  # another rank may only be looking whether somebody has it
                    time.sleep(TRY_SECONDS)
                    continue
                raise self._in_use_by(_read_lock(self._path)[1]) from None
            except OSError as error:
                os.close(handle)
                raise folder_fault(f"{self._path} cannot be locked", error) from error
            if _is_at(handle, self._path):
                before = _read_lock(self._path)[1]
                self._sign(handle)
                return handle, before
            os.close(handle)  # its holder removed it between our open and our lock
        raise TierError(f"{self._path} keeps changing. Do several jobs use this folder?")

    def _sign(self, handle: int) -> None:
        """Write whose the lock is. On a disk without room for that, leave nothing."""
        content = json.dumps({"job": self.job, **asdict(Holder.me())}).encode()
        try:
            os.ftruncate(handle, 0)
            if os.pwrite(handle, content, 0) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(handle)
            raise folder_fault(f"The folder {self.folder} cannot be written to", error) from error

    def _remove_leftovers(self, before: Holder | None) -> None:
        """Remove files with this rank's prefix whose process is gone."""
        leftovers = [path for path in self.folder.glob(f"{self._prefix}.*") if path != self._path]
        for path in leftovers:
            with contextlib.suppress(OSError):  # it belongs to nobody, and only a file of the same name would conflict
                path.unlink()
        if before is not None or leftovers:
            holder = before or Holder("an unknown host", 0, 0.0)
            _log.warning("%s was left by %s, which was killed; it is used again.", self.folder, holder)


def remove_files_beside(path: Path) -> None:
    """Remove all files of the rank that has made `path`. It is gone, and nobody reads them any more."""
    for other in path.parent.glob(f"{_lock_of(path).stem}.*"):
        other.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    """The lock of the rank that has made the file `path`."""
    return path.with_name(f"{path.name.partition('.')[0]}.lock")


def _read_lock(path: Path) -> tuple[str | None, Holder | None]:
    """The job and the process that a lock file names."""
    try:
        fields = json.loads(read_own_text(path, MAX_LOCK_BYTES))
        return str(fields.get("job", "")), Holder.read(fields)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, CheckpointError):
        return "", None


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


def _release(handle: int, path: Path, owner: int, patience: Patience) -> None:
    if patience.is_over:  # to remove a file may not return; the kernel gives the lock back when the process ends
        return
    if os.getpid() == owner and _is_at(handle, path):  # a fork's copy must not unlink its parent's file
        with contextlib.suppress(OSError):
            path.unlink()
    os.close(handle)
