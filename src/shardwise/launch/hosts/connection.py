"""A connection to one host: a process of ssh, and threads that read its output."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Container
from typing import Any, Protocol

from shardwise.launch.hosts.host_messages import (
    Message,
    Outbox,
    Sink,
    Source,
    bounded_lines,
    is_about,
    report,
)
from shardwise.launch.places.hosts import Share
from shardwise.system.printable import printable

Arrivals = queue.Queue[tuple["Connection", Message]]
_NUM_STDERR_LINES = 30
_MAX_STDERR_LINE_BYTES = 2**16
MAX_ARRIVALS = 256
"""Messages that may be queued; beyond that, hosts wait."""


class Carrier(Protocol):
    """What carries messages to a host and back: a process such as ssh, or a connection that the host has opened."""

    @property
    def stdin(self) -> Sink | None: ...
    @property
    def stdout(self) -> Source | None: ...
    @property
    def stderr(self) -> Source | None: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class Connection:
    """Puts the host's messages into `arrivals`, and `{"kind": "lost"}` after the last one."""

    def __init__(
        self,
        share: Share,
        command: list[str],
        arrivals: Arrivals,
        numbers: Container[int] | None = None,
        carrier: Carrier | None = None,
    ) -> None:
        """Begin to connect. Messages may be about the ranks of the share, or about the members `numbers`, which may
        grow. If the host has opened the connection, `carrier` is it; else the command is started. Raises `OSError` if
        there is no ssh."""
        self.share = share
        self.heard = time.monotonic()
        """When its last message arrived."""
        self._numbers = share.ranks if numbers is None else numbers
        self.name = share.host.name
        self.command = command[0]
        """The program that carries the messages: `ssh` or `srun`."""
        self.is_lost = False
        """Whether its last message was seen, while the launcher waited for answers of hosts."""
        self._arrivals = arrivals
        self._complaints: deque[str] = deque(maxlen=_NUM_STDERR_LINES)
        self._has_answered = False
        pipe = subprocess.PIPE
        # a session of its own: Ctrl-C reaches only the launcher, which passes it on
        self._ssh: Carrier = carrier or subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert self._ssh.stdin is not None
        self._outbox = Outbox(self._ssh.stdin)
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read_errors, self._read)]
        for reader in self._readers:
            reader.start()

    def send(self, do: str, **details: Any) -> None:
        """Send an order to the host; does nothing if the host is lost."""
        self._outbox.send({"do": do, **details})

    @property
    def status(self) -> int | None:
        """ssh's exit status; None while it runs."""
        return self._ssh.poll()

    @property
    def complaints(self) -> str:
        """The last lines on stderr of ssh, or of the command it started."""
        return "\n".join(self._complaints)

    def cut(self) -> None:
        """Kill ssh, without waiting for further messages."""
        self._ssh.kill()

    def close(self, seconds: float) -> None:
        """Wait for the host to end by itself, and kill ssh if it does not. May be called twice."""
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
            if message is not None and is_about(message, self._numbers):
                self._has_answered = True
                self.heard = time.monotonic()
                self._arrivals.put((self, message))
        self._readers[0].join(1)  # so that `complaints` are complete
        self._ssh.wait()
        self._arrivals.put((self, {"kind": "lost"}))

    def _read_errors(self) -> None:
        assert self._ssh.stderr is not None
        for line in bounded_lines(self._ssh.stderr, _MAX_STDERR_LINE_BYTES):
            text = printable(line.decode(errors="backslashreplace").rstrip())
            self._complaints.append(text)
            if self._has_answered and text:
                print(f"{self.name}: {text}", file=sys.stderr, flush=True)
