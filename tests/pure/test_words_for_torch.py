"""Functions that torch calls are named in words in errors: by their names, which have to be those that they have."""

from __future__ import annotations

import ast
from pathlib import Path

import shardwise.errors

SOURCE = Path(shardwise.errors.__file__).parent


def test_what_is_said_in_words_is_a_function_of_its_module() -> None:
    found = 0
    for path in SOURCE.rglob("*.py"):
        if "CALLED_BY_TORCH = " not in (text := path.read_text()):
            continue
        found += 1
        tree = ast.parse(text)
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        (words,) = (
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CALLED_BY_TORCH"
        )
        named = set(eval(compile(ast.Expression(words), str(path), "eval")))
        assert named <= defined, (path.name, named - defined)
    assert found
