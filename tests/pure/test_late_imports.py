"""Modules of ours that are imported by name, where they are used: of those, types say nothing."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise

SOURCE = Path(shardwise.__file__).parent


def imported_late(node: ast.AST) -> str | None:
    """The module of ours that a call `importlib.import_module("...")` imports."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"):
        return None
    name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return name if isinstance(name, str) and name.startswith("shardwise.") else None


def asked_of_late_imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Each such module of a file, and each name that it is asked for, at once or by the variable that holds it."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        held = {
            ast.unparse(node.targets[0]): module
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and (module := imported_late(node.value)) is not None
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                module = imported_late(node.value) or held.get(ast.unparse(node.value))
                if module is not None:
                    yield module, node.attr


ASKED = sorted({one for path in SOURCE.rglob("*.py") for one in asked_of_late_imports(ast.parse(path.read_text()))})


def test_there_are_some() -> None:
    assert ("shardwise.cli.model_file", "build_model") in ASKED


@pytest.mark.parametrize("module", sorted({module for module, _ in ASKED}))
def test_what_is_asked_of_them_is_there(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for of, name in ASKED if of == module and not hasattr(there, name)] == []
