"""Accepts the connections of pods: see [Note: connections that hosts open] in `sealed_lines.py`."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable

from shardwise.launch.hosts.host_messages import Message, packed
from shardwise.launch.hosts.sealed_lines import SealedConnection, SealedSink, SealedSource, accept_host
from shardwise.system.job_token import ForgedError

_ACCEPT_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_MOST_AT_ONCE = 256


class PodCarrier:
    """The connection of a pod, as a `Carrier` of messages."""

    def __init__(self, sealed: SealedConnection) -> None:
        self.name = sealed.name
        self.stdin = SealedSink(sealed.connection, sealed.to_host)
        self.stdout = SealedSource(sealed.connection, sealed.to_launcher)
        self.stderr = io.BytesIO()
        self._socket = sealed.connection

    def poll(self) -> int | None:
        """None: the status of the process in the pod is unknown here."""
        return None

    def kill(self) -> None:
        """Close the connection at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        """Close the connection; after the last message there is nothing to wait for."""
        del timeout
        self.kill()
        self._socket.close()
        return 0

    def close(self) -> None:
        """Close a connection that was not taken."""
        self.wait()
        self.stdout.close()


class PodServer:
    """Accepts pods that have the token, in its own threads."""

    def __init__(self, listener: socket.socket, token: str, say: Callable[[str], None]) -> None:
        self._listener, self._token, self._say = listener, token, say
        self._waiting: dict[str, PodCarrier] = {}
        self._lock = threading.Lock()
        self._last_message: Message | None = None
        self._num_accepting = threading.Semaphore(_MOST_AT_ONCE)
        self._has_complained = False
        self._closing = threading.Event()
        threading.Thread(target=self._listen, name="shardwise-pods", daemon=True).start()

    def names(self) -> list[str]:
        """The names of pods whose connections wait to be taken."""
        with self._lock:
            return list(self._waiting)

    def take(self, name: str) -> PodCarrier:
        with self._lock:
            return self._waiting.pop(name)

    def close_with(self, message: Message) -> None:
        """Send this message to pods that wait or connect from now on, and close their connections."""
        with self._lock:
            self._last_message = message
            waiting, self._waiting = list(self._waiting.values()), {}
        for carrier in waiting:
            self._send_last(carrier)

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for carrier in self._waiting.values():
                carrier.close()
            self._waiting.clear()

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                connection, where = self._listener.accept()
            except OSError:  # closed; or too many open files for now, or a connection that was reset while it waited
                self._closing.wait(_RETRY_SECONDS)
                continue
            if not self._num_accepting.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._accept, args=(connection, str(where[0])), daemon=True).start()

    def _accept(self, connection: socket.socket, where: str) -> None:
        try:
            carrier = PodCarrier(accept_host(connection, self._token, _ACCEPT_SECONDS))
        except (OSError, ForgedError) as error:
            connection.close()
            if isinstance(error, ForgedError) and not self._has_complained:
                self._has_complained = True
                self._say(
                    f"a connection from {where} is refused: it does not have the token of this job (SHARDWISE_TOKEN)."
                )
            return
        finally:
            self._num_accepting.release()
        with self._lock:
            if self._closing.is_set():
                carrier.close()
                return
            is_late = self._last_message is not None
            before = None if is_late else self._waiting.get(carrier.name)
            if not is_late:
                self._waiting[carrier.name] = carrier
        if before is not None:
            before.close()
        if is_late:
            self._send_last(carrier)

    def _send_last(self, carrier: PodCarrier) -> None:
        assert self._last_message is not None
        with contextlib.suppress(OSError):
            carrier.stdin.write(packed(self._last_message))
        carrier.close()
