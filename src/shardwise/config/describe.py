"""The plan in words: what a field may hold, and what a given plan holds and why."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.config.schema import Plan

_PLAIN: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def plan_table(plan: Plan) -> list[tuple[str, object, str]]:
    """(path, value, origin) of every single value of `plan`, in the order of the schema."""
    return [(path, value, plan.origin(path)) for path, value in _values(plan, "")]


def schema_table() -> list[tuple[str, str, object]]:
    """(path, type in words, default) of every field that a plan has, in the order of the schema."""
    return [
        (path, in_words(field), field.get_default())
        for path, field in _fields(Plan, "")
        if not _is_section(field.annotation) and not _named_section(field.annotation)
    ]


def known_keys(path: tuple[str, ...]) -> list[str]:
    """The keys that the section at `path` has; `()` is the plan itself."""
    section: Any = Plan
    for key in path:
        section = _named_section(section) or section.model_fields[key].annotation
    return [] if _named_section(section) else list(section.model_fields)


def words_at(path: tuple[str, ...]) -> str | None:
    """What may stand at `path`, in words; None where the schema has no such place."""
    section: Any = Plan
    for depth, key in enumerate(path):
        if _named_section(section):
            section = _named_section(section)
            continue
        field = section.model_fields.get(key)
        if field is None:
            return None
        if not _is_section(field.annotation) and not _named_section(field.annotation):
            rest = path[depth + 1 :]
            return in_words(field) if not rest else _words_below(field.annotation)
        section = field.annotation
    if _named_section(section):
        return f"a mapping of names to mappings with {_either(list(_named_section(section).model_fields))}"
    return f"a mapping with {_either(list(section.model_fields))}"


def in_words(field: FieldInfo) -> str:
    """What `field` may hold: `fp64, fp32, bf16 or null`."""
    words = _alternatives(field.annotation)
    bounds = _bounds(field.metadata)
    return _either([word + bounds if word in ("a number", "a whole number") else word for word in words])


def _alternatives(annotation: Any) -> list[str]:
    """Each form that a value of `annotation` may have."""
    if annotation in _PLAIN:
        return [_PLAIN[annotation]]
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        return [word for one in inner for word in _alternatives(one)]
    if kind is Literal:
        return [str(one) for one in inner]
    if kind is Annotated:
        said = [note.description for note in inner[1:] if isinstance(note, FieldInfo) and note.description]
        return said or _alternatives(inner[0])
    if kind is dict:
        key, value = (_either(_alternatives(one)) for one in inner)
        return [f"a mapping of {key} to {value}"]
    raise TypeError(f"The schema uses {annotation!r}, which describe.py has no words for; add them.")


def _words_below(annotation: Any) -> str | None:
    """What the values of a plain mapping such as `mesh` may be."""
    for one in (annotation, *get_args(annotation)):
        if get_origin(one) is dict:
            return _either(_alternatives(get_args(one)[1]))
    return None


def _bounds(metadata: list[Any]) -> str:
    said = [f" of at least {note.ge}" for note in metadata if getattr(note, "ge", None) is not None]
    said += [f" above {note.gt:g}" for note in metadata if getattr(note, "gt", None) is not None]
    return "".join(said)


def _either(words: list[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _named_section(annotation: Any) -> Any:
    """The section that each value of `annotation` is, where that is a mapping of the user's own names to sections."""
    inner = get_args(annotation)
    return inner[1] if get_origin(annotation) is dict and _is_section(inner[1]) else None


def _fields(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in section.model_fields.items():
        yield prefix + key, field
        named: Any = _named_section(field.annotation)
        below: Any = named or field.annotation
        if _is_section(below):
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
