"""The sections of a plan in words: their keys, and what a field may hold. Knows pydantic, but not the plan."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.plan.other_names import hint_for_key

_PLAIN: dict[object, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def known_keys(root: type[BaseModel], path: tuple[str, ...]) -> list[str]:
    """The keys of the section at `path`; `()` is the root itself."""
    section = _annotation_at(root, path)
    return list(section.model_fields) if is_section(section) else []


def words_at(root: type[BaseModel], path: tuple[str, ...]) -> str | None:
    """What may stand at `path`, in words; None if the schema has no such place."""
    section: Any = root
    for depth, key in enumerate(path):
        if named_section(section):
            section = named_section(section)
            continue
        field = section.model_fields.get(key)
        if field is None:
            return None
        inner = _if_given(field.annotation)
        if not is_section(inner) and not named_section(field.annotation):
            rest = path[depth + 1 :]
            return in_words(field) if not rest else _words_below(field.annotation)
        section = inner
    if named_section(section):
        return f"a mapping of names to mappings with {_either(list(named_section(section).model_fields))}"
    mapping = f"a mapping with {_either(list(section.model_fields))}"
    shorthand = getattr(section, "shorthand", "")  # what a section takes in place of a mapping
    return f"{shorthand}, or {mapping}" if shorthand else mapping


def unknown_at(root: type[BaseModel], path: tuple[str, ...]) -> str | None:
    """Why the schema has no place `path`, naming its first unknown key; None if it has one."""
    depth = next((depth for depth in range(len(path)) if words_at(root, path[: depth + 1]) is None), None)
    if depth is None:
        return None
    above, key = path[:depth], path[depth]
    section = ".".join(above)
    if not is_section(_annotation_at(root, above)):
        return f"{section} has no keys of its own."
    return f"unknown key {key!r} in {section or 'the plan'}. {hint_for_key(key, known_keys(root, above))}"


def _annotation_at(root: type[BaseModel], path: tuple[str, ...]) -> Any:
    """The annotation of an existing place."""
    annotation: Any = root
    for key in path:
        annotation = named_section(annotation) or _if_given(annotation.model_fields[key].annotation)
    return annotation


def _if_given(annotation: Any) -> Any:
    """The section in `Section | None`; any other annotation as it is."""
    sections = [one for one in get_args(annotation) if is_section(one)]
    is_optional = get_origin(annotation) in (Union, types.UnionType)
    return sections[0] if is_optional and len(sections) == 1 else annotation


def in_words(field: FieldInfo) -> str:
    """What `field` may hold, such as `fp64, fp32, bf16 or null`."""
    words = _alternatives(field.annotation)
    bounds = _bounds(field.metadata)
    return _either([word + bounds if word in ("a number", "a whole number") else word for word in words])


def _alternatives(annotation: Any) -> list[str]:
    """Each form that a value of `annotation` may take."""
    if annotation in _PLAIN:
        return [_PLAIN[annotation]]
    kind, inner = get_origin(annotation), get_args(annotation)
    if kind in (Union, types.UnionType):
        return [word for one in inner for word in _alternatives(one)]
    if kind is Literal:
        return [str(one) for one in inner]
    if kind is Annotated:
        descriptions = [note.description for note in inner[1:] if isinstance(note, FieldInfo) and note.description]
        return descriptions or _alternatives(inner[0])
    if kind is dict:
        key, value = (_either(_alternatives(one)) for one in inner)
        return [f"a mapping of {key} to {value}"]
    raise TypeError(f"The schema uses {annotation!r}, which words.py has no words for; add them.")


def _words_below(annotation: Any) -> str | None:
    """What the values of a plain mapping such as `mesh` may be."""
    for one in (annotation, *get_args(annotation)):
        if get_origin(one) is Annotated:
            one = get_args(one)[0]
        if get_origin(one) is dict:
            return _either(_alternatives(get_args(one)[1]))
    return None


def _bounds(metadata: list[Any]) -> str:
    least, above, most, below = (
        next((getattr(note, name) for note in metadata if getattr(note, name, None) is not None), None)
        for name in ("ge", "gt", "le", "lt")
    )
    if least is not None and most is not None:
        return f" from {least} to {most}"
    bounds = [("of at least", least), ("above", above), ("of at most", most), ("below", below)]
    return " and".join(f" {word} {bound}" for word, bound in bounds if bound is not None)


def _either(words: list[str]) -> str:
    return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def named_section(annotation: Any) -> Any:
    """For a mapping of the user's own names to sections: the type of these sections; None for anything else."""
    inner = get_args(annotation)
    return inner[1] if get_origin(annotation) is dict and is_section(inner[1]) else None
