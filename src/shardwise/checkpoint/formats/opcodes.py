"""Reads a pickle as data: its opcodes make numbers, text, containers and `Made`, and never use a class.

[Note: inert pickles] Python's unpickler looks up every name that a file contains, calls what it finds, and sets
attributes on it, even on the class itself; a list of allowed names does not help against the latter. Here a name stays
text, an object is its name with arguments and state, and there is nothing else: a file can only describe objects.
Opcodes that `pickle` does not write for protocols 2 to 5 are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from mmap import mmap
from typing import Any

from shardwise.errors import CheckpointError

MAX_INT_BYTES = 16
ORDERED = ("collections.OrderedDict", "builtins.dict")


class Name:
    """A class or function named in a file, as text."""

    __slots__ = ("full",)

    def __init__(self, full: str) -> None:
        self.full = full


class Made:
    """The result of a call of a class or function in a file, unevaluated: name, arguments, and later additions."""

    __slots__ = ("args", "elements", "items", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] = {}
        self.elements: list[Any] = []

    def field(self, key: str) -> Any:
        """An attribute of the object's state; `None` if there is none of that name."""
        state = self.state[0] if isinstance(self.state, tuple) and self.state else self.state
        return state.get(key) if isinstance(state, dict) else None


class Outside:
    """A persistent id, for data outside of the pickle: in torch's files the bytes of a tensor."""

    __slots__ = ("key",)

    def __init__(self, key: Any) -> None:
        self.key = key


def read_pickle(content: bytes | mmap, where: str, start: int = 0) -> tuple[Any, int]:
    """The object pickled in `content` from byte `start` on, as plain data, and the offset of the byte after it.

    `where` names the file in errors, which are `CheckpointError`. Time and memory are within a small factor of the
    pickle's length. The result may be nested as deeply as it is long, may contain itself, and may share parts: walk it
    with a limit.
    """
    machine = _Machine(content, start)
    try:
        return machine.run()
    except _RefusedError as error:
        raise CheckpointError(f"{where} cannot be read: {error}.") from error
    except (IndexError, KeyError, ValueError, struct.error) as error:
        raise CheckpointError(f"{where} cannot be read: its pickle is damaged.") from error


class _RefusedError(Exception):
    """The reason why a pickle is refused."""


class _Machine:
    """The stack, the marks and the memo of a pickle, as `pickletools` describes them."""

    def __init__(self, content: bytes | mmap, start: int) -> None:
        self._content = content
        self._at = start
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> tuple[Any, int]:
        content, known, memo = self._content, _KNOWN, self._memo
        while True:
            at = self._at
            code = content[at]
            self._at = at + 1
            if code == _MEMOIZE:  # these three opcodes are two thirds of a large pickle
                memo[len(memo)] = self._stack[-1]
            elif code == _GET:
                self._stack.append(memo[content[at + 1]])
                self._at = at + 2
            elif code == _LONG_GET:
                self._stack.append(memo[int.from_bytes(content[at + 1 : at + 5], "little")])
                self._at = at + 5
            elif code == _STOP:
                return self._stack.pop(), self._at
            elif code in known:
                known[code](self)
            else:
                raise _RefusedError(f"its pickle has the opcode {chr(code)!r}, which no checkpoint needs")

    # -- bytes ------------------------------------------------------------------------------------------

    def _take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._content):
            raise _RefusedError("its pickle ends too early")
        return self._content[start : self._at]

    def _number(self, num_bytes: int) -> int:
        return int.from_bytes(self._take(num_bytes), "little")

    def skip(self, num_bytes: int) -> None:
        self._take(num_bytes)

    def integer(self, num_bytes: int, *, signed: bool) -> None:
        self._stack.append(int.from_bytes(self._take(num_bytes), "little", signed=signed))

    def long(self, length_bytes: int) -> None:
        length = self._number(length_bytes)
        if length > MAX_INT_BYTES:
            raise _RefusedError(f"its pickle has a number of {length} bytes")
        self.integer(length, signed=True)

    def float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def text(self, length_bytes: int) -> None:
        self._stack.append(self._take(self._number(length_bytes)).decode())

    def bytes(self, length_bytes: int) -> None:
        self._stack.append(self._take(self._number(length_bytes)))

    def _line(self) -> str:
        end = self._content.find(b"\n", self._at)
        if end < 0:
            raise _RefusedError("its pickle ends too early")
        return self._take(end + 1 - self._at)[:-1].decode()

    # -- containers -------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def make(self, kind: Callable[[], Any]) -> None:
        self._stack.append(kind())

    def tuple(self, length: int) -> None:
        if len(self._stack) < length:
            raise IndexError
        items = tuple(self._stack[-length:])
        self._stack[-length:] = [items]

    def marked_tuple(self) -> None:
        items = tuple(self._marked())
        self._stack.append(items)

    def append(self) -> None:
        self._extend([self._stack.pop()])

    def appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            target = target.elements
        if not isinstance(target, list):
            raise _RefusedError("its pickle appends to something that is not a list")
        target.extend(items)

    def set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def set_items(self) -> None:
        self._update(self._marked())

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Made):
            target = target.items
        if not isinstance(target, dict) or len(items) % 2:
            raise _RefusedError("its pickle sets keys of something that is not a dict")
        for key in items[::2]:
            if not isinstance(key, str | int | float | Made | None):  # hashing nested tuples may never end
                raise _RefusedError(f"its pickle has a {type(key).__name__} as a key")
        target.update(zip(items[::2], items[1::2], strict=True))

    # -- memo -------------------------------------------------------------------------------------------

    def put(self, length_bytes: int) -> None:
        self._memo[self._number(length_bytes)] = self._stack[-1]

    # -- objects ----------------------------------------------------------------------------------------

    def name(self) -> None:
        module = self._line()
        self._stack.append(Name(f"{module}.{self._line()}"))

    def stacked_name(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise _RefusedError("its pickle has a class name that is not text")
        self._stack.append(Name(f"{module}.{name}"))

    def call(self) -> None:
        args, called = self._stack.pop(), self._stack.pop()
        if not isinstance(called, Name) or not isinstance(args, tuple):
            raise _RefusedError("its pickle calls something that is not a name")
        self._stack.append({} if called.full in ORDERED and not args else Made(called.full, args))

    def call_with_keywords(self) -> None:
        self._stack.pop()
        self.call()

    def build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, dict):
            return  # attributes of an OrderedDict, such as the `_metadata` of a state dict
        if not isinstance(target, Made) or target.state is not None:
            raise _RefusedError("its pickle sets attributes of something that it did not make")
        target.state = state

    def outside(self) -> None:
        self._stack.append(Outside(self._stack.pop()))


_STOP, _MEMOIZE, _GET, _LONG_GET = ord("."), 0x94, ord("h"), ord("j")
_KNOWN: dict[int, Callable[[_Machine], None]] = {
    0x80: lambda it: it.skip(1),  # PROTO
    0x95: lambda it: it.skip(8),  # FRAME
    ord("N"): lambda it: it.push(None),
    0x88: lambda it: it.push(True),
    0x89: lambda it: it.push(False),
    ord("K"): lambda it: it.integer(1, signed=False),
    ord("M"): lambda it: it.integer(2, signed=False),
    ord("J"): lambda it: it.integer(4, signed=True),
    0x8A: lambda it: it.long(1),
    0x8B: lambda it: it.long(4),
    ord("G"): _Machine.float,
    0x8C: lambda it: it.text(1),
    ord("X"): lambda it: it.text(4),
    0x8D: lambda it: it.text(8),
    ord("U"): lambda it: it.text(1),  # text of Python 2
    ord("T"): lambda it: it.text(4),
    ord("C"): lambda it: it.bytes(1),
    ord("B"): lambda it: it.bytes(4),
    0x8E: lambda it: it.bytes(8),
    0x96: lambda it: it.bytes(8),  # a bytearray
    ord("("): _Machine.mark,
    ord(")"): lambda it: it.push(()),
    0x85: lambda it: it.tuple(1),
    0x86: lambda it: it.tuple(2),
    0x87: lambda it: it.tuple(3),
    ord("t"): _Machine.marked_tuple,
    ord("]"): lambda it: it.make(list),
    ord("}"): lambda it: it.make(dict),
    ord("a"): _Machine.append,
    ord("e"): _Machine.appends,
    ord("s"): _Machine.set_item,
    ord("u"): _Machine.set_items,
    ord("q"): lambda it: it.put(1),
    ord("r"): lambda it: it.put(4),
    ord("c"): _Machine.name,
    0x93: _Machine.stacked_name,
    ord("R"): _Machine.call,
    0x81: _Machine.call,  # NEWOBJ
    0x92: _Machine.call_with_keywords,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.outside,
}
