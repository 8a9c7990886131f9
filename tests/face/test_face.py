"""The public face, as text: a change to it is a line in a diff, made on purpose.

Write the snapshots anew with

    python tests/face/test_face.py
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shardwise
from shardwise.cli.main import COMMANDS, main
from shardwise.plan import schema_table

SNAPSHOTS = Path(__file__).parent / "snapshots"


def exported_names() -> str:
    """What `from shardwise import ...` offers, and what its modules list."""
    listed = []
    for name in shardwise.__all__:
        found = getattr(shardwise, name)
        listed.append(name)
        if isinstance(found, ModuleType):
            listed += [f"{name}.{inner}" for inner in found.__all__]
    return "".join(f"{name}\n" for name in sorted(listed))


def signatures() -> str:
    """Parameters of public functions, constructors and methods, with their defaults."""
    lines = []
    for name in exported_names().split():
        found = operator.attrgetter(name)(shardwise)
        if inspect.isclass(found):
            lines += [f"{name}.{line}" for line in _members(found)]
        elif inspect.isfunction(found):
            lines.append(name + _parameters(found))
    return "".join(f"{line}\n" for line in lines)


def _members(kind: type) -> Iterator[str]:
    own = [one for one in kind.__mro__ if one.__module__.startswith("shardwise")]
    for name in sorted({name for one in own for name in vars(one)}):
        member = inspect.getattr_static(kind, name)
        plain = member.__func__ if isinstance(member, staticmethod | classmethod) else member
        if name == "model_post_init":  # pydantic's hook, whose parameter has another name in each of its releases
            continue
        if inspect.isfunction(plain) and (name == "__init__" or not name.startswith("_")):
            yield name + _parameters(plain)
        elif isinstance(member, property) and not name.startswith("_"):
            yield name


def _parameters(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def command_options() -> str:
    """Arguments and options of every command, with their choices."""
    lines = []
    for name, (module, _) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        lines += [f"{name} {line}" for line in _options(parser)]
    return "".join(f"{line}\n" for line in lines)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from (f"{name} {line}" for line in _options(inner))
        elif not isinstance(action, argparse._HelpAction):
            choices = "" if action.choices is None else f" {{{','.join(map(str, action.choices))}}}"
            yield (", ".join(action.option_strings) or action.dest) + choices


def command_help() -> str:
    """What `shardwise --help` prints."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        main(["--help"])
    return page.getvalue()


def plan_fields() -> str:
    """Every field of a plan: path, type, default."""
    rows = schema_table()
    path_width = max(len(path) for path, _, _ in rows)
    type_width = max(len(words) for _, words, _ in rows)
    return "".join(f"{path:<{path_width}}  {words:<{type_width}}  {default!r}\n" for path, words, default in rows)


FACES: dict[str, Callable[[], str]] = {
    "exported_names.txt": exported_names,
    "signatures.txt": signatures,
    "command_options.txt": command_options,
    "shardwise_help.txt": command_help,
    "plan_fields.txt": plan_fields,
}


@pytest.mark.parametrize("name", FACES)
def test_the_face_is_as_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown, recorded = FACES[name](), (SNAPSHOTS / name).read_text()
    assert shown == recorded, f"{name} changed; if on purpose: python tests/face/test_face.py"


def test_no_snapshot_is_left_over() -> None:
    assert {file.name for file in SNAPSHOTS.iterdir()} == set(FACES)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        for name, face in FACES.items():
            (SNAPSHOTS / name).write_text(face())
