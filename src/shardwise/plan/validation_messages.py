"""Pydantic's errors as short messages: where the value comes from, what it is, what was expected."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwise.errors import ConfigError, nearest
from shardwise.plan.files.formats import KeyPath, flatten
from shardwise.plan.words import known_keys, words_at

_ELSEWHERE = {
    **dict.fromkeys(("float8", "quantize", "fp8_format", "fp8_recipe"), "fp8"),
    "recipe_name": "recipe",
    "filter_fqns": "skip",
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "start_step",
    "min_compression_rate": "min_rate",
    "random_seed": "seed",
    "sync_every": "every",
    "outer_optimizer": "optimizer",
    "fragment_sync_delay": "overlap",
    "fragment_update_alpha": "mix",
    "should_quantize": "wire",
}
"""Keys of torchtitan, Megatron-LM, torch's PowerSGD and torchft's DiLoCo, and what they are called in a plan."""


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
        if problem["type"] == "extra_forbidden":
            messages[path] = _unknown_key(path, root, name)
        else:
            messages[path] = _wrong_value(path, _at(values, path), problem["msg"], root, name)
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


def _unknown_key(path: KeyPath, root: type[BaseModel], name: str) -> str:
    section, known = ".".join(path[:-1]) or name, known_keys(root, path[:-1])
    ours = _ELSEWHERE.get(path[-1])
    hint = f"Here it is called {ours!r}." if ours in known else nearest(path[-1], known)
    return f"unknown key {path[-1]!r} in {section}. {hint}"


def _wrong_value(path: KeyPath, value: object, message: str, root: type[BaseModel], name: str) -> str:
    expected = words_at(root, path)
    hint = f"expected {expected}" if expected else message
    if path == ("precision",) and value in ("fp8", "transformer-engine"):
        hint += ": layers that multiply in 8 bits are set by fp8, such as fp8: rowwise, beside precision: bf16"
    if isinstance(value, str) and ":" in value and "mapping" in hint:
        hint += ": {key: value}, with a space after the colon, and quotes around it in a shell"
    return f"{'.'.join(path) or name} is {reprlib.repr(value)}; {hint}."
