"""Messages between launcher and hosts: one line of JSON each, mixed with whatever else a shell may print.

Each kind of message has a schema; lines that do not match it, or are too long, are ignored.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import threading
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from shardwise.launch.outcome import Outcome
from shardwise.system import plain_data
from shardwise.system.plain_data import OneOf, Shape

Message = dict[str, Any]
BEATS = 5
"""Messages that each side sends within the silence after which the other side considers it lost."""
MAX_LINE_BYTES = 2**24
MAX_TEXT_CHARS = 2**20
"""Output of a rank in one message, at most."""
MAX_TRACEBACK_CHARS = 2**16
_MARK = b"\x1e"  # "record separator": no shell prints it
_NUMBER, _SECONDS = OneOf(None, int), OneOf(None, float)
_OUTCOME = {
    **dict.fromkeys(("rank", "exit_code"), int),
    **dict.fromkeys(("sent", "wanted"), _NUMBER),
    **dict.fromkeys(("summary", "traceback", "last_status", "batch", "lost_with"), str),
    "time": float,
    "sent_at": _SECONDS,
    **dict.fromkeys(("recorded", "is_status_lost"), bool),
    "at_fault": [int],
}
_JOB = {
    "command": [str],
    "run_by": [str],
    **dict.fromkeys(("is_module", "shows_one_device"), bool),
    **dict.fromkeys(("port", "threads"), _NUMBER),
    **dict.fromkeys(("nproc", "max_restarts"), int),
    "log_dir": None,
    "grace_seconds": float,
    **dict.fromkeys(("python", "bind"), str),
    "elastic": None,  # membership is decided by the launcher
}
_SEATS = [(str, str, int)]
_VOICE = {"number": int, "version": int, "hosts": _SEATS, "before": [str]}
_ATTEMPT = {
    **dict.fromkeys(("address", "run_id", "token"), str),
    **dict.fromkeys(("port", "number", "max_restarts"), int),
}
ORDERS: dict[str, dict[str, Shape]] = {
    "alive": {},
    "look": {"directory": str, "job": _JOB},
    "listen": {"address": str, "port": _NUMBER},
    "reach": {"address": str, "port": int},
    "prepare": {"run_id": str, "token": str},
    "start": {
        "first_rank": int,
        "position": {"size": int, "host": int, "num_hosts": int},
        "attempt": _ATTEMPT,
        "environment": {str: str},
    },
    "end": {"number": int},
    "kill": {},
    "cancel_rendezvous": {"attempt": int, "ended": [int], "living": [int]},
    "last_status": {"attempt": int, "ranks": [int]},
    "bye": {},
    "over": {"status": int},
    "members": {"silence_seconds": float},
    "begin": {},
    "member": {
        **dict.fromkeys(("number", "rank", "size", "local"), int),
        "attempt": _ATTEMPT,
        "environment": {str: str},
    },
    "end_member": {"number": int},
    "end_job": {},
    "is_stopped": {"number": int, "pid": int},
    "trust": {"token": str, "environment": {str: str}},
    "launcher": {"number": int, "host": str, "port": int},
    "keep": {
        **dict.fromkeys(("label", "state"), str),
        **dict.fromkeys(("number", "version"), int),
        "hosts": _SEATS,
        "before": [str],
        "seconds": float,
    },
    "adopt": {"members": [int]},
    "elected": {"label": str, "address": str, "port": int},
    "leave_out": {"steps": [int]},
    "record": {"line": {str: OneOf(None, bool, int, float, str, [int], [str])}},
}
"""Orders to a host, by their key `do`."""
REPORTS: dict[str, dict[str, Shape]] = {
    "facts": {**dict.fromkeys(("python", "shardwise", "torch", "problem"), str), "time": float},
    "listening": {"address": str, "port": int},
    "reached": {"problem": str},
    "prepared": {},
    "problem": {"text": str},
    "ended": {"ranks": [int]},
    "failed": {},
    "signal": {"number": int},
    "over": {"outcomes": [_OUTCOME], "killed": int},
    "last_status": {"statuses": [(int, str)]},
    "output": {"rank": int, "is_error": bool, "text": str},
    "members": {"address": str, "launcher": str, "problem": str, "port": int},
    "kept": {"version": int},
    "adopted": {"members": [int], "time": float},
    "voice": _VOICE,
    "returning": {**_VOICE, "label": str, "state": str},
    "member": {"outcome": _OUTCOME, "ran_out": bool, "skips": bool},
    "stopped": {"number": int, "is_so": bool},
    "left_out": {},
    "beat": {},
}
"""Messages of a host, by their key `kind`."""


class Sink(Protocol):
    """Where messages are written, each whole."""

    def write(self, block: bytes, /) -> object: ...
    def flush(self) -> object: ...
    def close(self) -> object: ...


class Source(Protocol):
    """Where lines are read, and `b""` at the end."""

    def readline(self, limit: int, /) -> bytes: ...
    def close(self) -> object: ...


def packed(message: Message) -> bytes:
    return _MARK + json.dumps(message).encode() + b"\n"


def order(line: bytes) -> Message | None:
    """The order in a line; None if the line is not a valid order."""
    return _unpacked(line, "do", ORDERS)


def report(line: bytes) -> Message | None:
    """The host's message in a line; None if the line is not a valid one."""
    return _unpacked(line, "kind", REPORTS)


def is_about(message: Message, ranks: Container[int]) -> bool:
    """Whether a message is only about these `ranks`, or members of an elastic job, which its host has. The last
    status of ranks is exempt, because it comes from the store."""
    has_another_number = message["kind"] in ("signal", "voice", "returning")
    named = [message[key] for key in ("rank", "number") if key in message and not has_another_number]
    outcomes = [*message.get("outcomes", ()), *([message["outcome"]] if "outcome" in message else ())]
    named = [*named, *message.get("ranks", ()), *(outcome["rank"] for outcome in outcomes)]
    return all(rank in ranks for rank in named)


def _unpacked(line: bytes, key: str, shapes: dict[str, dict[str, Shape]]) -> Message | None:
    if not line.startswith(_MARK):
        return None
    try:
        message: Message = plain_data.read(line[1:], dict, max_bytes=MAX_LINE_BYTES)
    except ValueError:
        return None
    kind = message.get(key)
    shape = shapes.get(kind) if isinstance(kind, str) else None
    return message if shape is not None and plain_data.fits(message, {key: str, **shape}) else None


def outcome_as_message(outcome: Outcome) -> Message:
    sent_at = None if math.isinf(outcome.sent_at) else outcome.sent_at
    sent = None if outcome.sent is None else int(outcome.sent)
    summary, traceback = outcome.summary[:MAX_TRACEBACK_CHARS], outcome.traceback[-MAX_TRACEBACK_CHARS:]
    return asdict(outcome) | {"sent_at": sent_at, "sent": sent, "summary": summary, "traceback": traceback}


def outcome_from(message: Message, ahead_seconds: float) -> Outcome:
    """The outcome in a host's message, with times corrected for its clock, which is `ahead_seconds` ahead of ours."""
    outcome = Outcome(**message)
    return replace(
        outcome,
        sent=None if message["sent"] is None else _signal(message["sent"]),
        sent_at=math.inf if message["sent_at"] is None else message["sent_at"] - ahead_seconds,
        time=outcome.time - ahead_seconds,
        at_fault=tuple(outcome.at_fault),
    )


def _signal(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError:  # a signal that this system does not have
        return signal.SIGTERM


def bounded_lines(stream: Source, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a stream, without those that are too long, so that an endless line cannot fill the memory."""
    is_rest = False
    while line := stream.readline(max_bytes + 2):
        is_whole = line.endswith(b"\n")
        if not is_rest and (is_whole or len(line) <= max_bytes + 1):
            yield line
        is_rest = not is_whole


class Inbox:
    """Reads orders from a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.closed = False
        self.heard = time.monotonic()
        self._descriptor = descriptor
        self._rest = bytearray()

    def take(self, seconds: float, others: Sequence[int] = ()) -> list[Message]:
        """The orders that have arrived, after at most `seconds`, or as soon as one of `others` is readable."""
        if self.closed or self._descriptor not in select.select([self._descriptor, *others], [], [], seconds)[0]:
            return []
        try:
            block = os.read(self._descriptor, 2**16)
        except ConnectionError:  # of a socket, where a pipe would end
            block = b""
        self.closed = not block
        self.heard = time.monotonic()
        *lines, rest = block.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray()
        if len(self._rest) <= MAX_LINE_BYTES + 1:  # a longer line is no message; its beginning is enough to tell
            self._rest += rest
        return [message for line in lines if (message := order(self._whole(line))) is not None]

    def _whole(self, line: bytes) -> bytes:
        """The message of a line, in whatever form it came."""
        return line


class Outbox:
    """Sends messages, from any thread; does nothing while the connection is lost."""

    def __init__(self, stream: Sink) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send_by(self, stream: Sink) -> None:
        """From now on, by another connection."""
        with self._lock:
            self._stream = stream

    def send(self, message: Message) -> None:
        with self._lock:
            try:
                self._stream.write(packed(message))
                self._stream.flush()
            except (OSError, ValueError):  # lost or closed, which the reading side notices
                pass
