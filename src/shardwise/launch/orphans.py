"""Ranks without a launcher: they go on for a while, so that another one can take over, and then end.

A launcher, the process that is ready to take over from it, and each rank hold locks on files in the job's folder, which
the system releases when they end, however they end. So there are no heartbeats, and a process that is stopped counts as
living. Imports only the standard library: a rank does before its script does.

    python -m shardwise.launch.orphans FOLDER PID GRACE_SECONDS      ends a rank, and removes the folder after the last
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path

from shardwise.system.job_folder import ENDING, JOB_LOCK, LAUNCHER_LOCK, STANDBY_LOCK

VARIABLE = "SHARDWISE_ORPHAN_SECONDS"
"""Set to SECONDS:GRACE_SECONDS for ranks that outlive their launcher: how long they go on without one, and how long
they may then take to end."""
_LOOK_SECONDS = 1.0
_SAID_BEGUN, _SAID_OVER = "orphans-begun", "orphans-over"


def lock_of(path: Path, operation: int) -> int | None:
    """A descriptor of `path`, locked by `fcntl.flock` with `operation`; `None` if it is locked, or cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether another process has a lock on `path` for itself."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def has_launcher(folder: Path) -> bool:
    """Whether the job of `folder` has a launcher, or a process that is about to be one."""
    return is_locked(folder / LAUNCHER_LOCK) or is_locked(folder / STANDBY_LOCK)


class Orphanhood:
    """How long a rank has been without a launcher."""

    def __init__(self, has_launcher: Callable[[], bool], longest_seconds: float) -> None:
        self._has_launcher, self._longest_seconds = has_launcher, longest_seconds
        self._since: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether there was no launcher at the last look."""
        return self._since is not None

    def lasts_too_long(self, now: float) -> bool:
        """Whether it has been, for `longest_seconds`."""
        if self._has_launcher():
            self._since = None
            return False
        self._since = now if self._since is None else self._since
        return now - self._since >= self._longest_seconds


def forget_orphans(folder: Path) -> None:
    """There is a launcher again."""
    (folder / _SAID_BEGUN).unlink(missing_ok=True)


def follow_launchers(environment: MutableMapping[str, str]) -> None:
    """Hold this rank's lock from here on, and end the rank once it has been without a launcher for too long. Does
    nothing for ranks that end with their launcher."""
    given = environment.pop(VARIABLE, "")
    if not given:
        return
    seconds, grace = given.split(":")
    folder = Path(environment["SHARDWISE_IMAGES"])
    lock_of(folder / JOB_LOCK, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until this process ends
    orphanhood = Orphanhood(lambda: has_launcher(folder), float(seconds))

    def watch() -> None:
        while not orphanhood.lasts_too_long(time.monotonic()):
            if orphanhood.has_begun:
                _say_once(
                    folder / _SAID_BEGUN,
                    f"this job has no launcher: it was killed, and so was the process that takes over. Its ranks go on "
                    f"for {seconds} s. `shardwise launch --takeover {folder}` takes over.",
                )
            time.sleep(_LOOK_SECONDS)
        _say_once(folder / _SAID_OVER, f"this job has had no launcher for {seconds} s. Its ranks end.")
        with contextlib.suppress(OSError):  # somebody has removed it, and the ranks must end all the same
            (folder / ENDING).touch()
        command = [sys.executable, "-m", "shardwise.launch.orphans", str(folder), str(os.getpid()), grace]
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    threading.Thread(target=watch, name="shardwise-orphan", daemon=True).start()


def _say_once(path: Path, text: str) -> None:
    """Print a line, unless another rank of this host has: the one that makes the file `path`."""
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        print(f"shardwise: {text}", file=sys.stderr, flush=True)


def main(folder: Path, pid: int, grace_seconds: float) -> None:
    """End a rank as a launcher does, and remove the folder if it was the last."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)  # a script with a `StopRequest` saves
        select.select([descriptor], [], [], grace_seconds)
        os.killpg(pid, signal.SIGKILL)  # its children too
    time.sleep(_LOOK_SECONDS)  # the others have noticed by then, and do the same
    if lock_of(folder / JOB_LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB) is not None:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
