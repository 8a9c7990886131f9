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
from shardwise.system.job_token import Seal
from shardwise.system.listening import listen_at

_LENGTH_BYTES = 4
_PROOF_BYTES = 32
_PROOF_SECONDS = 5
"""How long one connection may delay the next ones before it is closed."""
_POLL_SECONDS = 0.2
_MAX_MESSAGE_BYTES = 2**28
LOOPBACK = "127.0.0.1"


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._send_lock = threading.Lock()
        self._received = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Raises `OSError` if the other end is gone."""
        self.send_all([message])

    def send_all(self, messages: Sequence[bytes]) -> None:
        framed = b"".join(len(message).to_bytes(_LENGTH_BYTES, "little") + message for message in messages)
        with self._send_lock:
            self._socket.sendall(framed)

    def receive(self) -> list[bytes]:
        """Wait for at least one message. An empty list: the other end has closed."""
        while True:
            messages = self._complete_messages()
            if messages:
                return messages
            try:
                more = self._socket.recv(2**16)
            except OSError:
                return []
            if not more:
                return []
            self._received += more

    def receive_ready(self) -> list[bytes] | None:
        """The messages that are complete after one read; `None`: the other end has closed.

        Does not block if the socket is readable.
        """
        try:
            more = self._socket.recv(2**16)
        except OSError:
            return None
        self._received += more
        return self._complete_messages() if more else None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _complete_messages(self) -> list[bytes]:
        messages = []
        while len(self._received) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._received[:_LENGTH_BYTES], "little")
            if end > _MAX_MESSAGE_BYTES:
                raise CommError("A message to or from the coordinator is longer than any can be.")
            if len(self._received) < end:
                break
            messages.append(bytes(self._received[_LENGTH_BYTES:end]))
            del self._received[:end]
        return messages


class SendQueue:
    """Messages to send on a link. A thread sends them in batches; `flush` sends them at once.

    Sending releases the GIL, and getting it back from busy threads takes long, so `put` does not send.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._queued: list[bytes] = []
        self._queue_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._wakes_thread = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="horovod-send-queue", daemon=True)
        self._thread.start()

    def put(self, encode: Callable[[], bytes]) -> None:
        """Queue the message that `encode` returns. Messages are encoded and sent in the same order."""
        with self._queue_lock:
            self._queued.append(encode())
        self._wakes_thread.set()

    def flush(self) -> None:
        """Send the queued messages. If the link is closed, the thread that receives from it reports that."""
        if not self._queued:
            return
        with self._send_lock:
            with self._queue_lock:
                messages, self._queued = self._queued, []
            if messages:
                with contextlib.suppress(OSError):
                    self._link.send_all(messages)

    def close(self) -> None:
        """Send the queued messages and end the thread."""
        self.flush()
        self._is_closed = True
        self._wakes_thread.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._wakes_thread.wait()
            self._wakes_thread.clear()
            self.flush()


class Listener:
    """Accepts the ranks' connections to the coordinator. Each rank proves with the job token that it belongs to the
    job."""

    def __init__(self, host: str) -> None:
        """`host` is the address by which other ranks reach this host."""
        self._listener = listen_at(host, 0)
        self._challenge = secrets.token_hex(_PROOF_BYTES)
        self._proof = Seal.of(os.environ).word(self._challenge)

    @property
    def address(self) -> str:
        """The port and the challenge, as text for the other ranks."""
        return f"{self._listener.getsockname()[1]} {self._challenge}"

    def close(self) -> None:
        self._listener.close()

    def admit(self, size: int, seconds: float, is_over: Callable[[], bool] | None = None) -> dict[int, Link]:
        """Accept a link to every rank. Connections without the proof are closed.

        Raises `CommError` after `seconds`, or soon after `is_over` returns true, because a rank is lost.
        """
        links: dict[int, Link] = {}
        deadline = time.monotonic() + seconds
        try:
            while len(links) < size:
                connection = self._accept(deadline, is_over)
                rank = self._verified_rank(connection, time.monotonic() + _PROOF_SECONDS)
                if rank is None or not 0 <= rank < size or rank in links:
                    connection.close()
                    continue
                connection.settimeout(None)
                links[rank] = Link(connection)
        except OSError as error:
            missing = sorted(set(range(size)) - set(links))
            for link in links.values():
                link.close()
            raise CommError(f"Ranks {missing} did not connect to Horovod's coordinator: {error}.") from error
        finally:
            self.close()
        return links

    def _accept(self, deadline: float, is_over: Callable[[], bool] | None) -> socket.socket:
        while True:
            self._listener.settimeout(min(_POLL_SECONDS, max(0.01, deadline - time.monotonic())))
            try:
                return self._listener.accept()[0]
            except TimeoutError:
                if time.monotonic() > deadline or (is_over is not None and is_over()):
                    raise

    def _verified_rank(self, connection: socket.socket, deadline: float) -> int | None:
        """The rank that connects; `None` without the proof."""
        received = b""
        with contextlib.suppress(OSError):
            while len(received) < _PROOF_BYTES + 4:
                connection.settimeout(max(0.01, deadline - time.monotonic()))
                more = connection.recv(_PROOF_BYTES + 4 - len(received))
                if not more or time.monotonic() > deadline:
                    return None
                received += more
        has_proof = len(received) == _PROOF_BYTES + 4 and hmac.compare_digest(received[:_PROOF_BYTES], self._proof)
        return int.from_bytes(received[_PROOF_BYTES:], "little") if has_proof else None


def connect(host: str, address: str, rank: int, seconds: float) -> Link:
    """Connect this rank to the coordinator. Raises `CommError` if it cannot be reached."""
    port, challenge = address.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=seconds)
        connection.sendall(Seal.of(os.environ).word(challenge) + rank.to_bytes(4, "little"))
    except OSError as error:
        raise CommError(f"Rank {rank} did not reach Horovod's coordinator at {host}:{port}: {error}.") from error
    connection.settimeout(None)
    return Link(connection)
