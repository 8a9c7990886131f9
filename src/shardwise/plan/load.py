"""Loading a plan from any source, with the origin of every value."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from shardwise.errors import ConfigError
from shardwise.plan.files.formats import KeyPath, SourceError, flatten
from shardwise.plan.files.sources import parse_value, read_source
from shardwise.plan.schema import Plan
from shardwise.plan.validation_messages import as_config_error

PlanSource = Plan | Mapping[str, Any] | str | os.PathLike[str]


def load_plan(source: PlanSource, overrides: Sequence[str] = ()) -> Plan:
    """The plan that `source` describes, changed by `overrides`.

    `source` is a `Plan`, a mapping or its text (`"{preset: zero3}"`), a `.yaml`, `.yml`, `.toml` or `.json` file, or
    the bare name of a preset (whether that preset exists is checked in `placement`). `overrides` are texts such as
    `wire.grad=bf16`, whose values are YAML, applied last. `ConfigError` names every wrong value with its file and line.
    """
    if isinstance(overrides, str | Mapping):
        raise ConfigError(f"overrides are a list of texts, such as ['wire.grad=bf16'], not {overrides!r:.60}.")
    values, origins = _read(source)
    _spell_out(values, origins)
    for override in overrides:
        _apply(override, values, origins)
        _spell_out(values, origins)
    try:
        plan = Plan.model_validate(values)
    except ValidationError as error:
        raise as_config_error(error, values, origins, root=Plan) from None
    plan._origins.update({".".join(path): origin for path, origin in origins.items()})
    return plan


def _read(source: PlanSource) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """The values of `source` as a new tree, and the origin of each."""
    if isinstance(source, Plan):
        values = source.model_dump(exclude_unset=True)
        return values, {path: source.origin(".".join(path)) for path in flatten(values)}
    if isinstance(source, Mapping):
        values = _copied(source, "the plan")
        return values, dict.fromkeys(flatten(values), "argument")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        values = _inline(source)
        return values, dict.fromkeys(flatten(values), "argument")
    if isinstance(source, str) and _is_name(source):
        return {"preset": source}, {("preset",): "argument"}
    if isinstance(source, str | os.PathLike) and os.fspath(source):
        path = Path(source)
        read = read_source(path)
        return _copied(read.values, "the plan"), {key: f"{path}:{line}" for key, line in read.lines.items()}
    raise ConfigError(f"A plan is a preset's name, a file, a mapping or a Plan, not {source!r:.60}.")


def _inline(text: str) -> dict[str, Any]:
    """A plan that is written out in the place of its name, in JSON or YAML."""
    try:
        value = parse_value(text)
    except SourceError as error:
        raise ConfigError(f"The plan {text!r:.80}: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"The plan {text!r:.80} is no mapping.")
    return _copied(value, "the plan")


def _is_name(source: str) -> bool:
    """`zero3` is a preset; `zero3.yaml` and `plans/zero3` are files."""
    return bool(source) and not Path(source).suffix and not any(mark in source for mark in "/\\")


def _copied(values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """A copy of the tree that overrides may modify: the mapping is the caller's, and YAML aliases share one object."""
    copy: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str):
            raise ConfigError(f"argument: the key {key!r} in {where} is not text.")
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        copy[key] = _copied(value, key) if isinstance(value, Mapping) else value
    return copy


def _spell_out(values: dict[str, Any], origins: dict[KeyPath, str]) -> None:
    """Expand `activations: recompute` to `activations: {policy: recompute}`, in the plan and in its rules, and
    `wire: {grad: bf16}` to `wire: {grad: {dtype: bf16}}`."""
    for name, key in (("wire", "param"), ("wire", "grad"), ("islands", "wire")):
        section = values.get(name)
        if isinstance(section, dict) and isinstance(section.get(key), str):
            section[key] = {"dtype": section[key]}
            origins[name, key, "dtype"] = origins[name, key]
    rules = values.get("rules")
    ruled = [(("rules", name), rule) for name, rule in rules.items()] if isinstance(rules, dict) else []
    for path, section in (((), values), *ruled):
        if isinstance(section, dict) and isinstance(section.get("activations"), str):
            section["activations"] = {"policy": section["activations"]}
            origins[(*path, "activations", "policy")] = origins[(*path, "activations")]


def _apply(override: str, values: dict[str, Any], origins: dict[KeyPath, str]) -> None:
    """Set the value of one `a.b=c` in `values`, and its origin in `origins`."""
    path, value = _parsed(override)
    origin = f"override {override!r}"
    section = values
    for depth, key in enumerate(path[:-1], start=1):
        if section.get(key) is None:
            section[key], origins[path[:depth]] = {}, origin
        section = section[key]
        if not isinstance(section, dict):
            raise ConfigError(
                f"{origin}: {'.'.join(path)} cannot be set, because {'.'.join(path[:depth])} is {section!r} "
                f"({origins[path[:depth]]}), not a mapping."
            )
    section[path[-1]] = value
    for known in [known for known in origins if known[: len(path)] == path]:
        del origins[known]
    below = flatten(value) if isinstance(value, dict) else {}
    origins.update({(*path, *key): origin for key in [(), *below]})


def _parsed(override: str) -> tuple[KeyPath, object]:
    name, equals, text = override.partition("=")
    path = tuple(key.strip() for key in name.split("."))
    if not equals or not all(path):
        raise ConfigError(f"override {override!r}: write path=value, such as wire.grad=bf16.")
    if not text.strip():
        raise ConfigError(f"override {override!r}: there is no value; write null for none.")
    try:
        value = parse_value(text)
    except SourceError as error:
        raise ConfigError(f"override {override!r}: {error} Put text with special characters in quotes.") from None
    return path, _copied(value, name) if isinstance(value, Mapping) else value
