"""Authenticated lines between two ends that share the token of a job.

[Note: connections that hosts open] If a host opens the connection, ssh does not authenticate it, so both ends prove
that they have the token. The launcher sends a random number; the host answers with its name and a random number of its
own, and a code (an HMAC) over them that depends on the first number. The code of each later line depends on both
numbers and the line's position: no line can be forged, repeated, left out or moved. Lines are not encrypted, so they
must not contain secrets.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from shardwise.launch.hosts.host_messages import Inbox
from shardwise.system import plain_data
from shardwise.system.job_token import ForgedError, Seal

_CODE_BYTES = 32
_CODE_CHARS = 2 * _CODE_BYTES
_HELLO = b"shardwise "
_MAX_HELLO_BYTES = 1024
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,252})")
_NUMBER = re.compile(r"[0-9a-f]{32}")


class SealedLines:
    """One direction of a connection."""

    def __init__(self, seal: Seal, direction: str) -> None:
        self._seal, self._direction, self._number = seal, direction, 0

    def close(self, line: bytes) -> bytes:
        """The line as it is sent, with its end."""
        return _closed(self._seal, self._next(), line.rstrip(b"\n")) + b"\n"

    def open(self, line: bytes) -> bytes:
        """The line as it was before `close`. Raises `ForgedError` for what the other end has not sent now."""
        return _opened(self._seal, self._next(), line.rstrip(b"\n"))

    def _next(self) -> str:
        self._number += 1
        return f"{self._direction}/{self._number}"


@dataclass(frozen=True)
class SealedConnection:
    """A connection whose ends have shown each other that they have the token."""

    connection: socket.socket
    name: str
    """The name of the host."""
    to_host: SealedLines
    to_launcher: SealedLines

    @classmethod
    def of(cls, connection: socket.socket, name: str, token: str, numbers: str) -> SealedConnection:
        """After both `numbers` were exchanged. From now on there is no timeout."""
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        seal = Seal(token, numbers)
        return cls(connection, name, SealedLines(seal, "to host"), SealedLines(seal, "to launcher"))


def accept_host(connection: socket.socket, token: str, seconds: float) -> SealedConnection:
    """The launcher's side. Raises `OSError`, or `ForgedError` for a host that does not have the token."""
    deadline = time.monotonic() + seconds
    first = secrets.token_hex(16)
    connection.settimeout(seconds)
    connection.sendall(_HELLO + first.encode() + b"\n")
    line = _opened(Seal(token, first), "hello", _line(connection, deadline))
    try:
        hello: dict[str, Any] = plain_data.read(line, dict, max_bytes=_MAX_HELLO_BYTES)
    except ValueError as error:
        raise ForgedError("its first line is not one of a host") from error
    name, second = hello.get("name"), hello.get("number")
    if not (isinstance(name, str) and isinstance(second, str) and _NAME.fullmatch(name) and _NUMBER.fullmatch(second)):
        raise ForgedError("its first line is not one of a host")
    return SealedConnection.of(connection, name, token, first + second)


def connect_to_launcher(connection: socket.socket, name: str, token: str, seconds: float) -> SealedConnection:
    """A host's side. Raises `OSError`, or `ForgedError` if no launcher is there."""
    deadline = time.monotonic() + seconds
    connection.settimeout(seconds)
    line = _line(connection, deadline)
    first = line.removeprefix(_HELLO).decode(errors="replace")
    if not line.startswith(_HELLO) or not _NUMBER.fullmatch(first):
        raise ForgedError("what listens there is not the launcher of a job")
    second = secrets.token_hex(16)
    hello = json.dumps({"name": name, "number": second}).encode()
    connection.sendall(_closed(Seal(token, first), "hello", hello) + b"\n")
    return SealedConnection.of(connection, name, token, first + second)


class SealedSink:
    """Writes the messages of one end."""

    def __init__(self, connection: socket.socket, lines: SealedLines) -> None:
        self._socket, self._lines = connection, lines

    def write(self, line: bytes) -> None:
        """One whole line. Raises `OSError`."""
        self._socket.sendall(self._lines.close(line))

    def flush(self) -> None:
        """Every line goes at once."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


class SealedSource:
    """The lines that arrive over a connection; a forged line ends them."""

    def __init__(self, connection: socket.socket, lines: SealedLines) -> None:
        self._file, self._lines = connection.makefile("rb"), lines

    def readline(self, limit: int) -> bytes:
        with contextlib.suppress(OSError, ForgedError):
            line = self._file.readline(limit + _CODE_CHARS)
            return self._lines.open(line) + b"\n" if line else b""
        return b""

    def close(self) -> None:
        self._file.close()


class SealedInbox(Inbox):
    """The orders of the launcher; a forged one closes the inbox."""

    def __init__(self, connection: socket.socket, lines: SealedLines) -> None:
        super().__init__(connection.fileno())
        self._lines = lines

    def _whole(self, line: bytes) -> bytes:
        try:
            return b"" if self.closed else self._lines.open(line)
        except ForgedError:
            self.closed = True
            return b""


def _closed(seal: Seal, name: str, line: bytes) -> bytes:
    return seal.close(name, line)[:_CODE_BYTES].hex().encode() + line


def _opened(seal: Seal, name: str, line: bytes) -> bytes:
    try:
        code = bytes.fromhex(line[:_CODE_CHARS].decode())
    except ValueError:  # of which UnicodeDecodeError is one
        code = b""
    if len(code) != _CODE_BYTES:
        raise ForgedError(f"what is at {name!r} has no code")
    return seal.open(name, code + line[_CODE_CHARS:])


def _line(connection: socket.socket, deadline: float) -> bytes:
    """The next line, and nothing of what follows it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("the other end has closed the connection")
        line += byte
        if len(line) > _MAX_HELLO_BYTES:
            raise ForgedError("its first line is too long")
        if time.monotonic() > deadline:
            raise TimeoutError("the other end is too slow")
    return line.rstrip(b"\n")
