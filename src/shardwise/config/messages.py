"""Pydantic's errors as short messages: where the value comes from, what it is, what was expected."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shardwise.config.formats import KeyPath
from shardwise.config.schema import Plan, flatten
from shardwise.config.words import known_keys, words_at
from shardwise.errors import ConfigError, nearest


def as_config_error(error: ValidationError, values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> ConfigError:
    """One error for everything that is wrong with `values`, one line each, in the order in which they were written."""
    messages: dict[KeyPath, str] = {}
    for problem in error.errors():
        path = _path(problem["loc"], values)
        if problem["type"] == "extra_forbidden":
            messages[path] = _unknown_key(path)
        else:
            messages[path] = _wrong_value(path, _at(values, path), problem["msg"])
    written = list(flatten(values))
    in_order = sorted(messages, key=lambda path: written.index(path) if path in written else -1)
    return ConfigError("\n".join(f"{origins.get(path, 'argument')}: {messages[path]}" for path in in_order))


def _path(location: tuple[int | str, ...], values: Mapping[str, Any]) -> KeyPath:
    """The part of pydantic's location that the user wrote; pydantic adds union branches and indices."""
    path: KeyPath = ()
    here: object = values
    for step in location:
        if not (isinstance(here, Mapping) and isinstance(step, str) and step in here):
            break
        path, here = (*path, step), here[step]
    return path


def _at(values: Mapping[str, Any], path: KeyPath) -> object:
    here: Any = values
    for key in path:
        here = here[key]
    return here


def _unknown_key(path: KeyPath) -> str:
    section = ".".join(path[:-1]) or "the plan"
    return f"unknown key {path[-1]!r} in {section}. {nearest(path[-1], known_keys(Plan, path[:-1]))}"


def _wrong_value(path: KeyPath, value: object, message: str) -> str:
    expected = words_at(Plan, path)
    hint = f"expected {expected}" if expected else message
    return f"{'.'.join(path) or 'the plan'} is {reprlib.repr(value)}; {hint}."
