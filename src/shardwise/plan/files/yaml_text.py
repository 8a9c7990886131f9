"""YAML: plan files, and the values of overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from shardwise.plan.files.formats import MAX_CHARS, MAX_VALUES, KeyPath, Source, SourceError, as_mapping

_MAX_DEPTH = 100


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: 1e-3 is a number (YAML 1.2), not text (YAML 1.1)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def parse(text: str) -> Any:
    """One YAML value, as strictly as a file; `SourceError` if it is not YAML."""
    return _compose(text)[1]


def read(text: str) -> Source:
    node, values = _compose(text)
    return Source(as_mapping(values), dict(_yaml_lines(node))) if node else Source({}, {})


def read_plainly(text: str) -> Any:
    """`text` as standard YAML, within the same limits: for other libraries' files.

    Raises `SourceError`, or `yaml.YAMLError`.
    """
    try:
        _check_bounds(text)
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return loader.construct_document(node)
    except RecursionError:
        raise SourceError("the values are nested too deeply.") from None


def _compose(text: str) -> tuple[yaml.Node | None, Any]:
    """The node tree with its marks, and the values that it represents."""
    try:
        _check_bounds(text)
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, None
        _count_values(node, {})
        _refuse_odd_keys(node, ())
        _refuse_odd_numbers(node)
        return node, loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = f"this is not YAML: {error.problem or error.context}."
        raise SourceError(why, mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SourceError(f"this is not YAML: {error.reason}.", line) from None
    except RecursionError:
        raise SourceError("the values are nested too deeply for a plan.") from None
    except ValueError as error:
        raise SourceError(f"a value cannot be read: {error}. If it is text, put it in quotes.") from None


def _check_bounds(text: str) -> None:
    """Called before anything is parsed, because the parser takes quadratic time in the depth of nesting."""
    if len(text) > MAX_CHARS:
        raise SourceError(f"it has more than {MAX_CHARS} characters, which is too long for a plan.")
    depth = 0
    for mark in re.findall(r"[\[{\]}]", text):
        depth += 1 if mark in "[{" else -1
        if depth > _MAX_DEPTH:
            raise SourceError("the values are nested too deeply for a plan.")


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node represents, counting aliases each time they are used: a few lines can expand to
    billions."""
    if id(node) in known:
        if not known[id(node)]:
            raise SourceError("an alias refers to the mapping that contains it.", node.start_mark.line + 1)
        return known[id(node)]
    known[id(node)] = 0
    inner = []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    number = known[id(node)] = 1 + sum(_count_values(part, known) for part in inner)
    if number > MAX_VALUES:
        raise SourceError(f"it stands for more than {MAX_VALUES} values.", node.start_mark.line + 1)
    return number


def _refuse_odd_keys(node: yaml.Node, above: tuple[yaml.Node, ...]) -> None:
    """Keys must be text and unique; YAML itself would silently keep the last."""
    if node in above:
        raise SourceError("an alias refers to the mapping that contains it.", node.start_mark.line + 1)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
            raise SourceError(f"the key {_as_written(key)} is not text. Put it in quotes.", line)
        name, colon, follows = key.value.partition(":")
        if colon and follows and not key.style and isinstance(value, yaml.ScalarNode) and value.value == "":
            raise SourceError(f"{key.value!r} is one word. Put a space after the colon: '{name}: {follows}'.", line)
        if key.value in seen:
            raise SourceError(f"the key {key.value!r} is given twice, first on line {seen[key.value]}.", line)
        seen[key.value] = line
        _refuse_odd_keys(value, (*above, node))


def _refuse_odd_numbers(node: yaml.Node) -> None:
    """YAML 1.1, which the parser reads, takes 010 for 8 and 1:30 for 90; later YAML and people do not."""
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and (":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value)):
            raise SourceError(
                f"{node.value} is {_as_number(node)} in YAML 1.1 and something else in YAML 1.2. Write the number in "
                f"decimal digits without a zero before them; text in quotes.",
                node.start_mark.line + 1,
            )
        return
    for part in node.value:
        for one in part if isinstance(part, tuple) else (part,):
            _refuse_odd_numbers(one)


def _as_number(node: yaml.ScalarNode) -> int | float:
    number: int | float = yaml.constructor.SafeConstructor().construct_object(node)
    return number


def _as_written(key: yaml.Node) -> str:
    return repr(key.value) if isinstance(key, yaml.ScalarNode) else "here"


def _yaml_lines(node: yaml.Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield (*path, key.value), key.start_mark.line + 1
            yield from _yaml_lines(value, (*path, key.value))
