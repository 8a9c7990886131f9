"""Functions of Python's standard library, each with the first sentence of its docstring."""

from __future__ import annotations

import ast
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LEAVE_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
_HELD_OUT_IN = 5
"""One module in so many is never trained on."""
_CODE_CHARACTERS = 400


@dataclass(frozen=True)
class Function:
    """`question` is what it is for, as its author says; `code` its text without that."""

    place: str
    question: str
    code: str

    @property
    def is_held_out(self) -> bool:
        return zlib.crc32(self.place.partition(":")[0].encode()) % _HELD_OUT_IN == 0


def stdlib_functions() -> list[Function]:
    """All that have a docstring, in the order of their files."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path for path in folder.rglob("*.py") if not _LEAVE_OUT & set(path.relative_to(folder).parts))
    return [function for path in paths for function in _functions_of(path, str(path.relative_to(folder)))]


def _functions_of(path: Path, name: str) -> Iterator[Function]:
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in old strings
            tree = ast.parse(text)
    except SyntaxError:
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        said = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ").split(". ")[0]
        if len(said.split()) >= 4:
            body = lines[node.body[1].lineno - 1 : node.end_lineno]
            arguments = ", ".join(one.arg for one in node.args.args)
            code = f"{node.name}({arguments}): " + " ".join(line.strip() for line in body)
            yield Function(f"{name}:{node.lineno} {node.name}", said, code[:_CODE_CHARACTERS])
