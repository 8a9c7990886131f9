"""The sockets between the coordinator and the ranks: framed messages over TCP, for small texts that cannot wait."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

from shardwise.errors import CommError
from shardwise.job_token import Seal
from shardwise.listening import listen_at

_HEAD = 4
_PROOF_BYTES = 32
_PROOF_SECONDS = 5
"""For which whoever comes may take all of the time of those after it."""
_LOOK_SECONDS = 0.2
_LONGEST_BYTES = 2**28
LOOPBACK = "127.0.0.1"


class Link:
    """One end. `send` from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises `OSError` if the other end is gone."""
        self.send_all([message])

    def send_all(self, messages: Sequence[bytes]) -> None:
        """Several at once."""
        framed = b"".join(len(message).to_bytes(_HEAD, "little") + message for message in messages)
        with self._sending:
            self._socket.sendall(framed)

    def receive(self) -> list[bytes]:
        """At least one message; none if the other end has closed. Blocks."""
        while True:
            messages = self._whole()
            if messages:
                return messages
            try:
                more = self._socket.recv(2**16)
            except OSError:
                return []
            if not more:
                return []
            self._arrived += more

    def receive_ready(self) -> list[bytes] | None:
        """What is whole after one read, which does not block once the socket is readable; `None` at the end."""
        try:
            more = self._socket.recv(2**16)
        except OSError:
            return None
        self._arrived += more
        return self._whole() if more else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _whole(self) -> list[bytes]:
        messages = []
        while len(self._arrived) >= _HEAD:
            end = _HEAD + int.from_bytes(self._arrived[:_HEAD], "little")
            if end > _LONGEST_BYTES:
                raise CommError("A message to or from the coordinator is longer than any can be.")
            if len(self._arrived) < end:
                break
            messages.append(bytes(self._arrived[_HEAD:end]))
            del self._arrived[:end]
        return messages


class SendQueue:
    """Messages to send on a link: by a thread, which batches them, or at once by `flush`.

    Sending releases the GIL, and getting it back from busy threads takes long, so `put` does not send.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._has_some = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="horovod-outbox", daemon=True)
        self._thread.start()

    def put(self, make: Callable[[], bytes]) -> None:
        """What `make` returns is sent in the order in which it was called."""
        with self._lock:
            self._waiting.append(make())
        self._has_some.set()

    def flush(self) -> None:
        """Send what waits; where the link is gone the reader of it finds out."""
        if not self._waiting:
            return
        with self._sending:
            with self._lock:
                messages, self._waiting = self._waiting, []
            if messages:
                with contextlib.suppress(OSError):
                    self._link.send_all(messages)

    def close(self) -> None:
        """Send what waits, and end the thread."""
        self.flush()
        self._is_closed = True
        self._has_some.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._has_some.wait()
            self._has_some.clear()
            self.flush()


class Listener:
    """Accepts the ranks' connections to the coordinator. Each rank proves with the job token that it belongs to the
    job."""

    def __init__(self, host: str) -> None:
        """`host` is where others reach this one."""
        self._listener = listen_at(host, 0)
        self._name = secrets.token_hex(_PROOF_BYTES)
        self._word = Seal.of(os.environ).word(self._name)

    @property
    def address(self) -> str:
        """The port, and what the word is about, as text for the other ranks."""
        return f"{self._listener.getsockname()[1]} {self._name}"

    def admit(self, size: int, seconds: float, is_over: Callable[[], bool] = bool) -> dict[int, Link]:
        """Accept a link to every rank. Connections without the proof are closed.

        Raises `CommError` after `seconds`, or soon after `is_over` returns true: then some rank is lost.
        """
        links: dict[int, Link] = {}
        deadline = time.monotonic() + seconds
        try:
            while len(links) < size:
                connection = self._next(deadline, is_over)
                rank = self._read_rank(connection, time.monotonic() + _PROOF_SECONDS)
                if rank is None or not 0 <= rank < size or rank in links:
                    connection.close()
                    continue
                connection.settimeout(None)
                links[rank] = Link(connection)
        except OSError as error:
            missing = sorted(set(range(size)) - set(links))
            for link in links.values():
                link.close()
            raise CommError(f"Ranks {missing} did not come to Horovod's coordinator: {error}.") from error
        finally:
            self._listener.close()
        return links

    def _next(self, deadline: float, is_over: Callable[[], bool]) -> socket.socket:
        while True:
            self._listener.settimeout(min(_LOOK_SECONDS, max(0.01, deadline - time.monotonic())))
            try:
                return self._listener.accept()[0]
            except TimeoutError:
                if time.monotonic() > deadline or is_over():
                    raise

    def _read_rank(self, connection: socket.socket, deadline: float) -> int | None:
        said = b""
        with contextlib.suppress(OSError):
            while len(said) < _PROOF_BYTES + 4:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                more = connection.recv(_PROOF_BYTES + 4 - len(said))
                if not more or time.monotonic() > deadline:
                    return None
                said += more
        is_known = len(said) == _PROOF_BYTES + 4 and hmac.compare_digest(said[:_PROOF_BYTES], self._word)
        return int.from_bytes(said[_PROOF_BYTES:], "little") if is_known else None


def connect(host: str, address: str, rank: int, seconds: float) -> Link:
    """Connect this rank to the coordinator. Raises `CommError` if it cannot be reached."""
    port, name = address.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=seconds)
        connection.sendall(Seal.of(os.environ).word(name) + rank.to_bytes(4, "little"))
    except OSError as error:
        raise CommError(f"Rank {rank} did not reach Horovod's coordinator at {host}:{port}: {error}.") from error
    connection.settimeout(None)
    return Link(connection)
