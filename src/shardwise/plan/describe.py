"""The plan in words: what each field may hold, and what a given plan holds and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.plan.schema import Plan
from shardwise.plan.words import in_words, is_section, named_section


def plan_table(plan: Plan) -> list[tuple[str, object, str]]:
    """(path, value, origin) of every value of `plan`, in the order of the schema."""
    return [(path, value, plan.origin(path)) for path, value in _values(plan, "")]


def schema_table() -> list[tuple[str, str, object]]:
    """(path, type in words, default) of every field of a plan, in the order of the schema."""
    return [
        (path, in_words(field), field.get_default())
        for path, field in _fields(Plan, "")
        if not is_section(field.annotation) and not named_section(field.annotation)
    ]


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in section.model_fields.items():
        yield prefix + key, field
        named: Any = named_section(field.annotation)
        below: Any = named or field.annotation
        if is_section(below):
            yield from _fields(below, f"{prefix}{key}.<name>." if named else f"{prefix}{key}.")


def _values(section: BaseModel, prefix: str) -> Iterator[tuple[str, object]]:
    for key in type(section).model_fields:
        value = getattr(section, key)
        if isinstance(value, BaseModel):
            yield from _values(value, f"{prefix}{key}.")
        elif isinstance(value, Mapping) and value:
            for name, one in value.items():
                path = f"{prefix}{key}.{name}"
                yield from _values(one, f"{path}.") if isinstance(one, BaseModel) else [(path, one)]
        else:
            yield prefix + key, value
