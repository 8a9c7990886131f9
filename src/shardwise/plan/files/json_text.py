"""JSON plan files."""

from __future__ import annotations

import json

from shardwise.plan.files.formats import KeyPath, Source, SourceError, as_mapping


def read(text: str) -> Source:
    if not text.strip():
        return Source({}, {})
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise SourceError(f"this is not JSON: {error.msg}.{_habit(text, error.pos)}", error.lineno) from None
    except ValueError as error:  # a number with thousands of digits
        raise SourceError(f"this cannot be read: {error}.") from None
    lines: dict[KeyPath, int] = {}
    if isinstance(values, dict):
        _walk_json(text, _skip(text, 0), (), lines)
    return Source(as_mapping(values), lines)


def _habit(text: str, at: int) -> str:
    """What is written at a position, or before it, that is right in Python and YAML."""
    here = text[at : at + 1]
    if here in ("'", "/", "#"):
        return " JSON has no comments, and text is in double quotes; a .yaml file may have both."
    if here in ("}", "]") and text[:at].rstrip().endswith(","):
        return " JSON has no comma after the last value."
    return " In JSON these are written true, false and null." if here in ("T", "F", "N") else ""


def _walk_json(text: str, at: int, path: KeyPath, lines: dict[KeyPath, int]) -> int:
    """Record the lines of the keys of the object that starts at `at` in valid JSON; returns where it ends."""
    at = _skip(text, at + 1)
    while text[at] != "}":
        line = text.count("\n", 0, at) + 1
        key, at = json.JSONDecoder().raw_decode(text, at)
        if (*path, key) in lines:
            raise SourceError(f"the key {key!r} is given twice, first on line {lines[*path, key]}.", line)
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
