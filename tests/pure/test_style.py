"""Lengths that ruff has no rule for; `pyproject.toml` bounds complexity, parameters and lines."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import shardwise

MOST_LINES_OF_A_CLASS = 310
MOST_LINES_OF_A_FUNCTION = 70


def statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """These and all inside them. `ast.walk` goes through expressions too, which takes as long as parsing."""
    for node in body:
        yield node
        for inside in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, inside, ()))
        for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from statements(branch.body)


def too_long(source: str) -> Iterator[str]:
    """Classes and functions of `source`, without their decorators, that are longer than they may be."""
    if source.count("\n") <= MOST_LINES_OF_A_FUNCTION:
        return
    for node in statements(ast.parse(source).body):
        if isinstance(node, ast.ClassDef):
            most = MOST_LINES_OF_A_CLASS
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            most = MOST_LINES_OF_A_FUNCTION
        else:
            continue
        assert node.end_lineno is not None
        num_lines = node.end_lineno - node.lineno + 1
        if num_lines > most:
            yield f"{node.lineno}: {node.name} has {num_lines} lines, and may have {most}"


def test_classes_and_functions_are_short() -> None:
    package = Path(shardwise.__file__).parent
    files = sorted(package.rglob("*.py"))
    assert len(files) > 100
    assert [f"{file.relative_to(package)}:{each}" for file in files for each in too_long(file.read_text())] == []


def test_long_ones_are_found() -> None:
    line = "        x = 1\n"
    for head, most in (("class A:\n", 310), ("def f():\n", 70), ("async def f():\n", 70)):
        assert list(too_long(head + (most - 1) * line)) == []
        assert len(list(too_long(head + most * line))) == 1
    for around in ("class A:", "def f():", "if a:", "try: pass\nexcept A:", "for a in b: pass\nelse:"):
        assert len(list(too_long(f"{around}\n    def f(self):\n" + 70 * line))) == (2 if "def" in around else 1)
