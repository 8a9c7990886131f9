"""Scripts of ranks find the tests' own modules, wherever they are started from."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
OWN = ("tests", "benchmarks")
FINDS_THEM = "sys.path.insert(0, str(Path(__file__).parents[2]))"


def test_a_script_that_imports_the_tests_modules_says_where_they_are() -> None:
    """pytest puts the checkout on the path of its own process alone; a developer's shell may hide that."""
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text()
        if path.name.startswith("test_") or path.name == "__main__.py" or "if __name__ ==" not in source:
            continue
        if "python -m tests." in source:  # started as a module, from the checkout
            continue
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        if any((node.module or "").split(".")[0] in OWN for node in imports):
            assert FINDS_THEM in source, f"{path.relative_to(TESTS)} is started as a script: add {FINDS_THEM}"
