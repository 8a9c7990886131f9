"""The hosts that a job may use, read again while it runs: from a file, or from a host discovery script."""

from __future__ import annotations

import queue
import shlex
import subprocess
import threading
from collections.abc import Callable

from shardwise.errors import ConfigError
from shardwise.launch.places.hosts import Host, parse_host_file

EVERY_SECONDS = 1.0
_SCRIPT_SECONDS = 60


def hosts_by_script(command: str) -> list[Host]:
    """Hosts from the output of a host discovery script: lines `host:slots`, as for Horovod. Raises `ConfigError`."""
    name = f"--host-discovery-script {command!r}"
    try:
        words = shlex.split(command)
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SCRIPT_SECONDS,
            check=False,
        )
    except (OSError, ValueError, IndexError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{name} cannot be run: {why}. Is it there, and executable?") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{name} did not end within {_SCRIPT_SECONDS} s.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it gave no reason"])[-1]
        raise ConfigError(f"{name} ended with status {done.returncode}: {last}.")
    return parse_host_file(done.stdout, name)


class HostList:
    """Reads the list periodically. A change counts when it was read twice, since a file may be half written."""

    def __init__(
        self,
        read: Callable[[], list[Host]],
        first: list[Host],
        say: Callable[[str], None],
        every_seconds: float,
    ) -> None:
        """`read` raises `ConfigError` for an invalid list; the last valid one stays in effect."""
        self._read, self._known, self._say = read, first, say
        self._every_seconds = every_seconds
        self._seen = first
        self._complaint = ""
        self._changes: queue.SimpleQueue[list[Host]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="shardwise-hosts", daemon=True)
        self._thread.start()

    def change(self) -> list[Host] | None:
        """The new list, if it has changed since the last call."""
        found = None
        while not self._changes.empty():
            found = self._changes.get()
        return found

    def close(self) -> None:
        self._closing.set()

    def _follow(self) -> None:
        while not self._closing.wait(self._every_seconds):
            try:
                seen = self._read()
            except ConfigError as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    self._say(f"{self._complaint} The list of hosts is unchanged.")
                continue
            self._complaint = ""
            if seen == self._seen and seen != self._known:
                self._known = seen
                self._changes.put(seen)
            self._seen = seen
