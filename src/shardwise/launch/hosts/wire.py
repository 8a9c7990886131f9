"""What the two ends of a connection say to each other: a line of JSON each, among whatever else a shell may print.

Each kind of message has a shape; what has another one, or is longer than any message, is left out.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import IO, Any

from shardwise import plain_data
from shardwise.launch.outcome import Outcome
from shardwise.plain_data import OneOf, Shape

Message = dict[str, Any]
MAX_LINE_BYTES = 2**24
MAX_TEXT_CHARS = 2**20
"""Of what a rank prints, in one message."""
MAX_TRACEBACK_CHARS = 2**16
_MARK = b"\x1e"  # "record separator": no shell prints it
_NUMBER, _SECONDS = OneOf(None, int), OneOf(None, float)
_OUTCOME = {
    **dict.fromkeys(("rank", "exit_code"), int),
    **dict.fromkeys(("sent", "wanted"), _NUMBER),
    **dict.fromkeys(("summary", "traceback", "last_words", "batch"), str),
    "time": float,
    "sent_at": _SECONDS,
    "recorded": bool,
    "blames": [int],
}
_JOB = {
    "command": [str],
    "run_by": [str],
    **dict.fromkeys(("is_module", "binds_cores", "shows_one_device"), bool),
    **dict.fromkeys(("port", "threads"), _NUMBER),
    **dict.fromkeys(("nproc", "max_restarts"), int),
    "log_dir": None,
    "grace_seconds": float,
    "python": str,
    "elastic": None,  # one agent has all ranks of such a job
}
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
        "seat": {"size": int, "host": int, "num_hosts": int},
        "attempt": _ATTEMPT,
        "environment": {str: str},
    },
    "end": {"number": int},
    "kill": {},
    "meeting": {"attempt": int, "ended": [int], "living": [int]},
    "words": {"attempt": int, "ranks": [int]},
    "bye": {},
}
"""What a host is told to `do`."""
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
    "words": {"words": [(int, str)]},
    "output": {"rank": int, "is_error": bool, "text": str},
}
"""What a host has `said`."""


def packed(message: Message) -> bytes:
    return _MARK + json.dumps(message).encode() + b"\n"


def order(line: bytes) -> Message | None:
    """What a host is told to do; None for a line that is none of ours."""
    return _unpacked(line, "do", ORDERS)


def report(line: bytes) -> Message | None:
    """What a host says; None for a line that is none of ours."""
    return _unpacked(line, "said", REPORTS)


def is_about(message: Message, ranks: range) -> bool:
    """Whether a host that has these `ranks` can say that. What ranks last said is in the store, of all of them."""
    named = [message["rank"]] if message["said"] == "output" else message.get("ranks", [])
    named = [*named, *(outcome["rank"] for outcome in message.get("outcomes", ()))]
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
    """The outcome that a host tells, whose clock is `ahead_seconds` before ours; who failed first depends on it."""
    outcome = Outcome(**message)
    return replace(
        outcome,
        sent=None if message["sent"] is None else _signal(message["sent"]),
        sent_at=math.inf if message["sent_at"] is None else message["sent_at"] - ahead_seconds,
        time=outcome.time - ahead_seconds,
        blames=tuple(outcome.blames),
    )


def _signal(number: int) -> signal.Signals:
    try:
        return signal.Signals(number)
    except ValueError:  # one that this system does not have
        return signal.SIGTERM


def bounded_lines(stream: IO[bytes], max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """The lines of a stream, but for those that are longer: nobody may fill this process's memory by not ending one."""
    is_rest = False
    while line := stream.readline(max_bytes + 2):
        is_whole = line.endswith(b"\n")
        if not is_rest and (is_whole or len(line) <= max_bytes + 1):
            yield line
        is_rest = not is_whole


class Inbox:
    """Orders that arrive at a descriptor, without waiting for more than there is."""

    def __init__(self, descriptor: int) -> None:
        self.closed = False
        self.heard = time.monotonic()
        self._descriptor = descriptor
        self._rest = bytearray()

    def take(self, seconds: float) -> list[Message]:
        """What has come, after at most `seconds`."""
        if self.closed or not select.select([self._descriptor], [], [], seconds)[0]:
            return []
        block = os.read(self._descriptor, 2**16)
        self.closed = not block
        self.heard = time.monotonic()
        *lines, rest = block.split(b"\n")
        if lines:
            lines[0] = bytes(self._rest) + lines[0]
            self._rest = bytearray()
        if len(self._rest) <= MAX_LINE_BYTES + 1:  # a longer one is no message: its beginning is enough to know that
            self._rest += rest
        return [message for line in lines if (message := order(line)) is not None]


class Outbox:
    """Messages that go out, whole, from any thread; nobody may be there to read them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock:
            try:
                self._stream.write(packed(message))
                self._stream.flush()
            except (OSError, ValueError):  # lost, or closed: whoever reads finds out
                pass
