"""Reports if hosts that join an elastic job later get other code than the first ones.

With `--rsync` a host gets this machine's directory when it joins. If the directory has changed since the job began, its
ranks run other code than the others. This is only reported, because it may be intended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardwise.launch.hosts.gather import list_of_files


class CodeCopy:
    """The files that `--rsync` sent at the start of a job."""

    def __init__(self, say: Callable[[str], None], read: Callable[[], str] = list_of_files) -> None:
        """`read` lists the files with their sizes and times. Raises what `read` raises."""
        self._say, self._read = say, read
        self._first = read()
        self._reported = self._first

    def compare(self, host: str) -> threading.Thread:
        """Compare the directory with those files, and report each change once; in a thread, because a large
        directory takes a while. Returns the thread."""
        thread = threading.Thread(target=self._compare, args=(host,), name="shardwise-code", daemon=True)
        thread.start()
        return thread

    def _compare(self, host: str) -> None:
        now = self._read()
        if now in ("", self._first, self._reported):
            return
        self._reported = now
        self._say(
            f"this directory has changed since the job began: {host} gets the files that are here now, and the other "
            f"hosts keep theirs. If that is not intended, restart the job."
        )
