"""Where hosts call that open the connection to the launcher by themselves: [Note: connections that hosts open]."""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable

from shardwise.job_token import ForgedError
from shardwise.launch.hosts.sealed_lines import Meeting, SealedSink, SealedSource, greet
from shardwise.launch.hosts.wire import Message, packed

_GREET_SECONDS = 10.0
_MOST_AT_ONCE = 256


class Caller:
    """A host that has called, as `Connection` takes what carries its messages."""

    def __init__(self, meeting: Meeting) -> None:
        self.name = meeting.name
        self.stdin = SealedSink(meeting.connection, meeting.to_host)
        self.stdout = SealedSource(meeting.connection, meeting.to_launcher)
        self.stderr = io.BytesIO()
        self._socket = meeting.connection

    def poll(self) -> int | None:
        """Of what runs there, no status is known here."""
        return None

    def kill(self) -> None:
        """Close the connection, whatever is on its way."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        """After the last message there is nothing to wait for."""
        del timeout
        self.kill()
        self._socket.close()
        return 0

    def close(self) -> None:
        """Of one that nobody has taken."""
        self.wait()
        self.stdout.close()


class Door:
    """Lets in who has the token, in threads of its own."""

    def __init__(self, listener: socket.socket, token: str, say: Callable[[str], None]) -> None:
        self._listener, self._token, self._say = listener, token, say
        self._callers: dict[str, Caller] = {}
        self._lock = threading.Lock()
        self._farewell: Message | None = None
        self._num_greeting = threading.Semaphore(_MOST_AT_ONCE)
        self._has_complained = False
        threading.Thread(target=self._listen, name="shardwise-door", daemon=True).start()

    def names(self) -> list[str]:
        """Of those that wait to be taken."""
        with self._lock:
            return list(self._callers)

    def take(self, name: str) -> Caller:
        with self._lock:
            return self._callers.pop(name)

    def send_away(self, farewell: Message) -> None:
        """Whoever waits, and whoever comes from now on, gets this message alone."""
        with self._lock:
            self._farewell = farewell
            waiting, self._callers = list(self._callers.values()), {}
        for caller in waiting:
            self._part(caller)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for caller in self._callers.values():
                caller.close()
            self._callers.clear()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, where = self._listener.accept()
                if not self._num_greeting.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._greet, args=(connection, str(where[0])), daemon=True).start()

    def _greet(self, connection: socket.socket, where: str) -> None:
        try:
            caller = Caller(greet(connection, self._token, _GREET_SECONDS))
        except (OSError, ForgedError) as error:
            connection.close()
            if isinstance(error, ForgedError) and not self._has_complained:
                self._has_complained = True
                self._say(
                    f"a connection from {where} is refused: it does not have the token of this job (SHARDWISE_TOKEN)."
                )
            return
        finally:
            self._num_greeting.release()
        with self._lock:
            is_late = self._farewell is not None
            before = None if is_late else self._callers.get(caller.name)
            if not is_late:
                self._callers[caller.name] = caller
        if before is not None:
            before.close()
        if is_late:
            self._part(caller)

    def _part(self, caller: Caller) -> None:
        assert self._farewell is not None
        with contextlib.suppress(OSError):
            caller.stdin.write(packed(self._farewell))
        caller.close()
