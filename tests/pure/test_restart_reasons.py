"""The table of what restarts or is refused when something is lost (docs/elastic.md), beside what the code says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.fit.loss_price import LAUNCHER_LOST

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/shardwise"
TITLE = "### What restarts, and what is refused\n"
RETURNED = {
    "program/image_bytes.py": ["why_no_images"],
    "elastic/survivable.py": ["_why_not"],
    "elastic/layouts.py": ["_why_lost"],
    "cli/explanation.py": ["why_restarted"],
    "launch/elastic/mirror.py": ["_cut_off"],
    "sharded/sharding.py": ["_no_room"],
}
"""Functions that return a reason."""
RAISING = [
    *("survivable", "recovery", "layouts", "regroup_reports", "copies", "image_space", "session", "rebuild"),
    "optimizer_attributes",
]
"""Modules of `elastic/` whose errors end an attempt, or refuse a job."""
CONSTANTS = {
    "program/image_bytes.py": ["ON_ACCELERATOR"],
    "elastic/session.py": ["_CANNOT_SKIP"],
    "elastic/plain_steps.py": ["_HAS_SCALER"],
    "elastic/survivable.py": ["IN_SHARD"],
}


def text_of(node: ast.expr | None) -> str:
    """The text of a literal, with `...` for values; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "..." for one in node.values)
    return ""


def reasons() -> Iterator[str]:
    for name, functions in RETURNED.items():
        every = [node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef)]
        own = [node for node in every if node.name in functions]
        assert sorted(node.name for node in own) == sorted(functions), f"{name} has other functions now"
        yield from (text_of(node.value) for one in own for node in ast.walk(one) if isinstance(node, ast.Return))
    for name in RAISING:
        for node in ast.walk(tree(f"elastic/{name}.py")):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                yield from map(text_of, node.exc.args)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
                yield from map(text_of, node.args)
    for name, constants in CONSTANTS.items():
        for node in tree(name).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in constants:
                yield text_of(node.value)
    yield LAUNCHER_LOST


def tree(name: str) -> ast.Module:
    return ast.parse((SOURCE / name).read_text())


def table() -> list[str]:
    """The texts in the first column."""
    text = (ROOT / "docs/elastic.md").read_text().partition(TITLE)[2].partition("\n#")[0]
    return re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)


def test_every_reason_has_a_row_and_every_row_a_reason() -> None:
    said, rows = [one for one in reasons() if one], table()
    assert len(rows) > 10
    missing = [one for one in said if not any(row in one for row in rows)]
    assert not missing, f"docs/elastic.md, table {TITLE.strip()}: add what is said here, or a part of it: {missing}"
    gone = [row for row in rows if not any(row in one for one in said)]
    assert not gone, f"docs/elastic.md, table {TITLE.strip()}: nothing says this any more: {gone}"
