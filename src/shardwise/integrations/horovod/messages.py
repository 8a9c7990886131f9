"""Requests of ranks and responses of the coordinator, and a cache: repeated messages are sent as a number."""

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
    """A collective that one rank has issued, on one tensor or, if grouped, on several."""

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
    """All-to-all: the number of rows for each rank; `None`: equal numbers."""
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    """`add_set`: the ranks of the new process set."""

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
    """What ranks execute next: one request that all have issued, several fused all-reduces, or an error."""

    verb: Verb
    names: tuple[str, ...]
    process_set: int = WORLD_SET
    error: str = ""
    """Why it is not executed. Every rank that has issued it raises this."""
    to: tuple[int, ...] = ()
    """The ranks that have issued it, if it is an error."""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    """All tensors' shapes, for ranks that have joined and do not have the tensors."""
    counts: tuple[int, ...] = ()
    """The number of tensors under each name."""
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    device: str = "cpu"
    joined: tuple[int, ...] = ()
    rows: tuple[tuple[int, ...], ...] = ()
    """All-gather: per tensor, the rows of each rank. All-to-all: per rank, the rows it sends to each rank."""
    number: int = -1
    """The number of an added or removed process set, or the last rank to join."""
    ranks: tuple[int, ...] = ()
    """The ranks of an added process set."""
    acknowledges: int = -1
    """The rank that notifies the coordinator when this is done."""
    is_invalid: bool = False
    """Whether it is not executed because of its arguments, which no ranks could carry out."""

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


class MessageEncoder:
    """Encodes messages of one link. A message that the receiver still has in its cache is sent as its slot number.

    Slots are reused in turn, so both ends evict the same messages.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._slots: dict[Request | Response, int] = {}
        self._cached: list[Request | Response] = []
        self._next = 0

    def encode(self, message: Request | Response) -> bytes:
        slot = self._slots.get(message)
        if slot is not None:
            return b"=" + slot.to_bytes(4, "little")
        slot = self._next
        self._next = (slot + 1) % self._capacity
        if slot < len(self._cached):
            del self._slots[self._cached[slot]]
            self._cached[slot] = message
        else:
            self._cached.append(message)
        self._slots[message] = slot
        return b"+" + slot.to_bytes(4, "little") + message.to_text().encode()


class MessageDecoder:
    """Decodes messages of a `MessageEncoder`; each is parsed only once."""

    def __init__(self, parse: Any) -> None:
        self._parse = parse
        self._cached: dict[int, Any] = {}

    def decode(self, message: bytes) -> Any:
        slot = int.from_bytes(message[1:5], "little")
        if message[:1] == b"+":
            self._cached[slot] = self._parse(message[5:].decode())
        return self._cached[slot]
