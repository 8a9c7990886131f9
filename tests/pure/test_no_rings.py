"""No modules of the package import each other in a ring: by imports at the top, in functions, under TYPE_CHECKING, or
by a module's name in a string (`import_module`, `python -m`), which import-linter does not see."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

import shardwise


def modules_below(folder: Path) -> dict[str, str]:
    """The text of every module, by its name."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = file.read_text()
    return found


def imports_of(modules: dict[str, str]) -> dict[str, set[str]]:
    """For each module the ones that it names. A package's `__init__` may name its parts in strings: it imports them
    when they are first asked for."""
    packages = {name.rpartition(".")[0] for name in modules}
    return {name: set(_named(text, modules, name in packages)) - {name} for name, text in modules.items()}


def _named(text: str, modules: dict[str, str], is_package: bool) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_package:
            yield from ({node.value} & modules.keys() if "." in node.value else ())


def rings_in(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """One ring after the other, each found without the links of those before."""
    rest, rings = {name: set(targets) for name, targets in graph.items()}, set()
    while True:
        try:
            TopologicalSorter(rest).prepare()
        except CycleError as error:
            ring = error.args[1]
            rings.add(frozenset(ring))
            for imported, importer in pairwise(ring):
                rest[importer].discard(imported)
            continue
        return rings


def test_no_modules_import_each_other_in_a_ring() -> None:
    assert rings_in(imports_of(modules_below(Path(shardwise.__file__).parent))) == set()


@pytest.mark.parametrize(
    "line",
    [
        "from p.a import x",
        "def f():\n    from p import a",
        "if TYPE_CHECKING:\n    from p.a import X",
        "import p.a",
        "importlib.import_module('p.a')",
        "RUN = ('python', '-m', 'p.a')",
    ],
)
def test_a_ring_is_found_however_it_is_closed(line: str, tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {"__init__": "HOMES = {'x': 'p.a'}", "a": "from p.b import y", "b": "from p.c import z"}.items():
        (package / f"{name}.py").write_text(text)
    (package / "c.py").write_text("z = 1")
    assert rings_in(imports_of(modules_below(package))) == set()
    (package / "c.py").write_text(line)
    assert rings_in(imports_of(modules_below(package))) == {frozenset({"p.a", "p.b", "p.c"})}
