"""YAML, JSON and TOML as plain values, with the line on which every key stands.

[Note: where a line number comes from]
YAML tells: its nodes carry marks. JSON's own reader does not, so a second, small walk over text that
is already known to be valid finds the keys. TOML's reader does not either; its text is cut into
statements (the fewest lines that parse on their own), and each statement is parsed alone to see which
keys it holds. Keys inside a list are not tracked: an error in there is reported at the list.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from shardwise.config.schema import flatten

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """What a file says, and the line of every key path in it."""

    values: dict[str, Any]
    lines: dict[KeyPath, int]


class SourceError(Exception):
    """A text that cannot be meant: why, and on which line if that is known. `sources` adds the file."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line


# --- YAML ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number (YAML 1.2), not text (YAML 1.1)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse_yaml(text: str) -> Any:
    """One YAML value, as strict as a file; `SourceError` with a sentence for what is no YAML."""
    return _compose(text)[1]


def read_yaml(text: str) -> Source:
    node, values = _compose(text)
    return Source(_mapping(values), dict(_yaml_lines(node))) if node else Source({}, {})


def _compose(text: str) -> tuple[yaml.Node | None, Any]:
    """The tree with its marks, and the values that it stands for."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _refuse_odd_keys(node, ())
        return node, loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = f"this is not YAML: {error.problem or error.context}."
        raise SourceError(why, mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SourceError(f"this is not YAML: {error.reason}.", line) from None
    except ValueError as error:
        raise SourceError(f"a value is not what its form says: {error}. Put it in quotes.") from None


def _refuse_odd_keys(node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
    """Keys must be text and stand once; YAML itself would keep the last and say nothing."""
    if node in above:
        raise SourceError("an alias refers to the mapping that it stands in.", node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            raise SourceError(f"the key {_as_written(key)} is not text. Put it in quotes.", line)
        if key.value in seen:
            raise SourceError(f"the key {key.value!r} stands twice, first on line {seen[key.value]}.", line)
        seen[key.value] = line
        _refuse_odd_keys(value, (*above, node))


def _as_written(key: yaml.Node) -> str:
    return repr(key.value) if isinstance(key, yaml.ScalarNode) else "here"


def _yaml_lines(node: yaml.Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _yaml_lines(value, (*path, key.value))


# --- JSON ---------------------------------------------------------------------------------------


def read_json(text: str) -> Source:
    if not text.strip():
        return Source({}, {})
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise SourceError(f"this is not JSON: {error.msg}.", error.lineno) from None
    except ValueError as error:  # a number of thousands of digits
        raise SourceError(f"this cannot be read: {error}.") from None
    lines: dict[KeyPath, int] = {}
    if isinstance(values, dict):
        _walk_json(text, _skip(text, 0), (), lines)
    return Source(_mapping(values), lines)


def _walk_json(text: str, at: int, path: KeyPath, lines: dict[KeyPath, int]) -> int:
    """Note the keys of the object that opens at `at` in valid JSON; return where it ends."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        line = text.count("\n", 0, at) + 1
        key, at = json.JSONDecoder().raw_decode(text, at)
        if (*path, key) in lines:
            raise SourceError(f"the key {key!r} stands twice, first on line {lines[*path, key]}.", line)
        lines[*path, key] = line
        at = _skip(text, _skip(text, at) + 1)
        if text[at] == "{":
            at = _walk_json(text, at, (*path, key), lines)
        else:
            _, at = json.JSONDecoder().raw_decode(text, at)
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return at + 1


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


# --- TOML ---------------------------------------------------------------------------------------


def read_toml(text: str) -> Source:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, _, place = str(error).partition(" (at ")
        line = re.match(r"line (\d+)", place)
        raise SourceError(f"this is not TOML: {why}.", int(line[1]) if line else None) from None
    return Source(values, dict(_toml_lines(text)))


def _toml_lines(text: str) -> Iterator[tuple[KeyPath, int]]:
    table: KeyPath = ()
    for line, statement, says in _toml_statements(text):
        keys = flatten(says)
        yield from (((*(() if statement.startswith("[") else table), *key), line) for key in keys)
        if statement.startswith("["):
            table = max(keys, key=len)


def _toml_statements(text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Each statement with its first line and what it says alone."""
    waiting, first = "", 1
    for line, content in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not waiting:
            first = line
        waiting += content + "\n"
        try:
            says = tomllib.loads(waiting)
        except tomllib.TOMLDecodeError:
            continue  # a list or a text over several lines
        if says:
            yield first, waiting.lstrip(), says
        waiting = ""


def _mapping(values: object) -> dict[str, Any]:
    if isinstance(values, Mapping):
        return dict(values)
    raise SourceError(f"a plan is a mapping of keys to values, such as 'preset: zero3', not {values!r:.60}.", 1)
