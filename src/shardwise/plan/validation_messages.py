"""Pydantic's errors as short messages: where the value comes from, what it is, what was expected."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwise.errors import ConfigError
from shardwise.plan.files.formats import KeyPath, flatten
from shardwise.plan.other_names import hint_for_key, hint_for_value
from shardwise.plan.words import known_keys, words_at


def as_config_error(
    error: ValidationError,
    values: Mapping[str, Any],
    origins: Mapping[KeyPath, str] | None = None,
    *,
    root: type[BaseModel],
    name: str = "the plan",
) -> ConfigError:
    """One error for everything that is wrong with `values`, one line each, in the order in which they were written.

    `root` is what they should be, and `name` what a message calls it. Values without an origin are arguments.
    """
    origins = origins or {}
    messages: dict[KeyPath, str] = {}
    for problem in error.errors():
        path = _path(problem["loc"], values)
        if problem["type"] == "missing":
            key = str(problem["loc"][-1])
            messages[*path, key] = f"{'.'.join(path) or name} has no key {key!r}, and needs one."
        elif problem["type"] == "extra_forbidden":
            messages[path] = _unknown_key(path, root, name)
        else:
            messages[path] = _wrong_value(path, _at(values, path), problem["msg"], root, name)
    written = list(flatten(values))
    in_order = sorted(messages, key=lambda path: written.index(path) if path in written else -1)
    places = {path: origins.get(path) or origins.get(path[:-1], "argument") for path in in_order}
    return ConfigError("\n".join(f"{places[path]}: {messages[path]}" for path in in_order))


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


def _unknown_key(path: KeyPath, root: type[BaseModel], name: str) -> str:
    above, key = path[:-1], path[-1]
    return f"unknown key {key!r} in {'.'.join(above) or name}. {hint_for_key(key, known_keys(root, above))}"


def _wrong_value(path: KeyPath, value: object, message: str, root: type[BaseModel], name: str) -> str:
    expected = words_at(root, path)
    hint = f"expected {expected}" if expected else message
    if cure := hint_for_value(".".join(path), value):
        hint += f": {cure}"
    if isinstance(value, str) and ":" in value and "mapping" in hint:
        hint += ": {key: value}, with a space after the colon, and quotes around it in a shell"
    return f"{'.'.join(path) or name} is {reprlib.repr(value)}; {hint}."
