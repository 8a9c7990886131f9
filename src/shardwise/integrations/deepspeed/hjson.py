"""Reads HJSON, in which DeepSpeed's configs may be written: JSON for people (https://hjson.github.io/syntax.html).

It has comments (`#`, `//`, `/* */`), keys and text without quotes, line ends in place of commas, trailing commas, and
text of several lines in `'''`. Plain JSON is HJSON, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

_SPACE = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_KEY = re.compile(r"[^\s,:\[\]{}'\"]+")
_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'")
_TEXT_LINES = re.compile(r"'''(.*?)'''", re.DOTALL)
_LINE = re.compile(r"[^\n]*")
_WORD = re.compile(r"(-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)\s*(?=$|[,\]}\n#]|//|/\*)")
"""What is no text although it has no quotes; anything else without quotes is text to the end of its line."""


def parse(text: str, make_object: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """The value that `text` describes. `make_object` gets the pairs of each object, in order.

    Raises `ValueError`, with line and column, for text that is not HJSON, and `RecursionError` for deep nesting.
    """
    reader = _Reader(text, make_object)
    value = reader.root()
    reader.skip()
    if reader.at < len(text):
        reader.fail("there is more after the end")
    return value


class _Reader:
    def __init__(self, text: str, make_object: Callable[[list[tuple[str, Any]]], Any]) -> None:
        self.text, self.at = text, 0
        self._make_object = make_object

    def fail(self, what: str) -> NoReturn:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - self.text.rfind("\n", 0, self.at)
        raise ValueError(f"{what} (line {line}, column {column})")

    def skip(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        if self.text.startswith("/*", self.at):
            self.fail("a comment has no end")  # each search for it would read all of the rest

    def root(self) -> Any:
        """The whole, an object whose braces may be left out."""
        self.skip()
        return self._value() if self._next() in ("{", "[") else self._make_object(self._members(""))

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, character: str) -> bool:
        is_there = self._next() == character
        self.at += is_there
        return is_there

    def _value(self) -> Any:
        if self._take("{"):
            return self._make_object(self._members("}"))
        if self._take("["):
            return self._items()
        if found := _TEXT_LINES.match(self.text, self.at):
            self.at = found.end()
            return "\n".join(line.strip() for line in found[1].strip().splitlines())
        if self._next() in ("'", '"'):
            return self._quoted()
        if found := _WORD.match(self.text, self.at):
            self.at = found.start() + len(found[1])
            return json.loads(found[1])
        found = _LINE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        if not found[0] or found[0][0] in ",:]}":
            self.fail("a value is missing")
        return found[0].strip()

    def _quoted(self) -> str:
        found = _TEXT.match(self.text, self.at)
        if found is None:
            self.fail("text has no closing quote")
        self.at = found.end()
        inner = found[0][1:-1]
        if found[0][0] == "'":
            inner = inner.replace("\\'", "'").replace('"', '\\"')
        text: str = json.loads(f'"{inner}"')
        return text

    def _members(self, end: str) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = []
        while True:
            self.skip()
            if self._take(end) if end else self.at >= len(self.text):
                return pairs
            pairs.append((self._key(), self._value()))
            self.skip()
            self._take(",")

    def _key(self) -> str:
        if self._next() in ("'", '"'):
            key = self._quoted()
        elif found := _KEY.match(self.text, self.at):
            key, self.at = found[0], found.end()
        else:
            self.fail("a key is missing")
        self.skip()
        if not self._take(":"):
            self.fail(f"there is no colon after {key!r}")
        self.skip()
        return key

    def _items(self) -> list[Any]:
        items: list[Any] = []
        while True:
            self.skip()
            if self._take("]"):
                return items
            items.append(self._value())
            self.skip()
            self._take(",")
