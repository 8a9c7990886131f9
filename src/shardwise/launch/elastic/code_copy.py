"""Whether hosts that join an elastic job later get the code with which it began.

With `--rsync` a host gets this machine's directory when it joins. If the directory has changed since the job began, its
ranks may run other code than the others do. That is told, since it may be what somebody wants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardwise.launch.hosts.gather import list_of_files


class CodeCopy:
    """What `--rsync` has sent at the start of a job."""

    def __init__(self, say: Callable[[str], None], read: Callable[[], str] = list_of_files) -> None:
        """`read` lists the files with their sizes and times. Raises what `read` raises."""
        self._say, self._read = say, read
        self._first = read()
        self._told = self._first

    def compare(self, host: str) -> threading.Thread:
        """Compare in a thread of its own, because a large directory takes a while; returns the thread. A change is told
        once."""
        thread = threading.Thread(target=self._compare, args=(host,), name="shardwise-code", daemon=True)
        thread.start()
        return thread

    def _compare(self, host: str) -> None:
        now = self._read()
        if now in ("", self._first, self._told):
            return
        self._told = now
        self._say(
            f"this directory has changed since the job began: {host} gets what is here now, and the others keep what "
            f"they have. If that is not meant, stop the job and start it again."
        )
