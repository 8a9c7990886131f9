"""A connection to one host: ssh as a process, and threads that read what comes."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from shardwise.launch.hosts.wire import Message, Outbox, bounded_lines, is_about, report
from shardwise.launch.places.hosts import Share

Arrivals = queue.Queue[tuple["Connection", Message]]
_KEPT_LINES = 30
_MAX_COMPLAINT_BYTES = 2**16
MAX_ARRIVALS = 256
"""So many messages may wait to be taken; then hosts wait."""


class Connection:
    """Messages of its host are put into `arrivals`, and `{"said": "lost"}` when there will be no more."""

    def __init__(self, share: Share, command: list[str], arrivals: Arrivals) -> None:
        """Begin to connect. Raises `OSError` if there is no ssh."""
        self.share = share
        self.name = share.host.name
        self.is_lost = False
        self._arrivals = arrivals
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._has_answered = False
        pipe = subprocess.PIPE
        # a session of its own: Ctrl-C reaches the launcher alone, which passes it on
        self._ssh = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self._ssh.stdin is not None
        self._outbox = Outbox(self._ssh.stdin)
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_errors, self._read)]
        for reader in self._readers:
            reader.start()

    def send(self, do: str, **details: Any) -> None:
        """Tell the host to do something; what is sent to a host that is lost goes nowhere."""
        self._outbox.send({"do": do, **details})

    @property
    def status(self) -> int | None:
        """With which ssh ended; None while it has not."""
        return self._ssh.poll()

    @property
    def complaints(self) -> str:
        """The last lines that ssh, or what it started, wrote on stderr."""
        return "\n".join(self._complaints)

    def close(self, seconds: float) -> None:
        """Let the host end by itself, and end ssh if it does not. Asking twice changes nothing."""
        with contextlib.suppress(OSError, ValueError):
            if self._ssh.stdin is not None:
                self._ssh.stdin.close()
        try:
            self._ssh.wait(seconds)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        for reader, stream in zip(self._readers, (self._ssh.stderr, self._ssh.stdout), strict=True):
            reader.join(1)
            if stream is not None and not reader.is_alive():
                stream.close()

    def _read(self) -> None:
        assert self._ssh.stdout is not None
        for line in bounded_lines(self._ssh.stdout):
            message = report(line)
            if message is not None and is_about(message, self.share.ranks):
                self._has_answered = True
                self._arrivals.put((self, message))
        self._readers[0].join(1)  # what it has to say about that
        self._ssh.wait()
        self._arrivals.put((self, {"said": "lost"}))

    def _read_errors(self) -> None:
        assert self._ssh.stderr is not None
        for line in bounded_lines(self._ssh.stderr, _MAX_COMPLAINT_BYTES):
            text = line.decode(errors="backslashreplace").rstrip()
            self._complaints.append(text)
            if self._has_answered and text:
                print(f"{self.name}: {text}", file=sys.stderr, flush=True)
