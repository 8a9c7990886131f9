"""Modules of ours that are imported by name, where they are used: of those, types say nothing."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

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


def test_what_is_asked_of_them_is_there() -> None:
    asked = defaultdict(set)
    for path in SOURCE.rglob("*.py"):
        if "import_module(" in (text := path.read_text()):  # few have it, and to go through a tree takes long
            for module, name in asked_of_late_imports(ast.parse(text)):
                asked[module].add(name)
    assert "build_model" in asked["shardwise.cli.model_file"]
    there = {module: importlib.import_module(module) for module in asked}
    assert [f"{of}.{name}" for of, names in asked.items() for name in names if not hasattr(there[of], name)] == []
