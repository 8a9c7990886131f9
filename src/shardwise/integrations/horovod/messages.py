"""What ranks and the coordinator tell each other, and how messages that come again travel as a number."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

Verb = Literal[
    "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join", "add_set", "remove_set"
]
WORLD_SET = 0
"""The process set of all ranks."""


@dataclass(frozen=True, slots=True)
class Request:
    """A collective that one rank has issued, on one tensor or, grouped, on several."""

    verb: Verb
    name: str
    process_set: int = WORLD_SET
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] | None = None
    """Of an all-to-all: how many rows go to each rank; `None`: equally many."""
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    """Of a process set that is to be made."""

    @property
    def key(self) -> tuple[int, str]:
        return self.process_set, self.name

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Request:
        given = json.loads(text)
        for name in ("dtypes", "ranks"):
            given[name] = tuple(given[name])
        given["shapes"] = tuple(tuple(shape) for shape in given["shapes"])
        given["splits"] = None if given["splits"] is None else tuple(given["splits"])
        return cls(**given)


@dataclass(frozen=True, slots=True)
class Response:
    """What ranks are to carry out now: one request that all have issued, or several all-reduces as one message."""

    verb: Verb
    names: tuple[str, ...]
    process_set: int = WORLD_SET
    error: str = ""
    """Why it is not carried out; every rank that has issued it raises this."""
    to: tuple[int, ...] = ()
    """Of an error: those ranks."""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of all tensors, for ranks that have joined and have none of them."""
    counts: tuple[int, ...] = ()
    """How many of them are of each name."""
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    device: str = "cpu"
    joined: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    """All-gather: of each tensor how many rows each rank has. All-to-all: how many each rank sends to each."""
    number: int = -1
    """The process set that was made or removed, or the rank that was the last to join."""
    ranks: tuple[int, ...] = ()
    """Of the process set that was made."""
    acknowledges: int = -1
    """The rank that tells the coordinator when this is done."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Response:
        given: dict[str, Any] = json.loads(text)
        for name in ("names", "to", "dtypes", "counts", "joined", "ranks"):
            given[name] = tuple(given[name])
        for name in ("shapes", "rows"):
            given[name] = tuple(tuple(row) for row in given[name])
        return cls(**given)


class Remembering:
    """The sender's memory of a link: what was sent before, and is still known at the other end, goes as a number.

    Slots are used in turn, so both ends forget the same.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._slots: dict[Request | Response, int] = {}
        self._kept: list[Request | Response] = []
        self._next = 0

    def encode(self, message: Request | Response) -> bytes:
        slot = self._slots.get(message)
        if slot is not None:
            return b"=" + slot.to_bytes(4, "little")
        slot = self._next
        self._next = (slot + 1) % self._capacity
        if slot < len(self._kept):
            del self._slots[self._kept[slot]]
            self._kept[slot] = message
        else:
            self._kept.append(message)
        self._slots[message] = slot
        return b"+" + slot.to_bytes(4, "little") + message.to_text().encode()


class Remembered:
    """The receiver's: what messages mean is worked out once."""

    def __init__(self, parse: Any) -> None:
        self._parse = parse
        self._known: dict[int, Any] = {}

    def decode(self, message: bytes) -> Any:
        slot = int.from_bytes(message[1:5], "little")
        if message[:1] == b"+":
            self._known[slot] = self._parse(message[5:].decode())
        return self._known[slot]
