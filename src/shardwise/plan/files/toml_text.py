"""TOML plan files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from shardwise.plan.files.formats import KeyPath, Source, SourceError, flatten

_MAX_LINES = 200


def read(text: str) -> Source:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, _, place = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", place)
        raise SourceError(f"this is not TOML: {why}.", int(line[1]) if line else None) from None
    return Source(values, dict(_toml_lines(text)))


def _toml_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    table: KeyPath = ()
    for line, statement, values in _toml_statements(text):
        keys = flatten(values)
        yield from (((*(() if statement.startswith("[") else table), *key), line) for key in keys)
        if statement.startswith("["):
            table = max(keys, key=len)


def _toml_statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each statement with its first line and the values that it sets on its own."""
    waiting, first = "", 1
    for line, content in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not waiting:
            first = line
        waiting += content + "\n"
        if line - first > _MAX_LINES:  # each line is parsed again together with those before it
            raise SourceError(f"a value has more than {_MAX_LINES} lines.", first)
        try:
            values = tomllib.loads(waiting)
        except tomllib.TOMLDecodeError:
            continue  # a list or a text that continues on the next line
        if values:
            yield first, waiting.lstrip(), values
        waiting = ""
