"""Which lines of a record can be shown. A record may be damaged, from another version, or edited by hand.

What shows a run should show what is left of it. So a line that is not of the expected form is left out, and so is a
value that is not a number where a number is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.system.plain_data import Shape, fits

Line = dict[str, Any]
_NUMBERS = ("loss", "seconds", "norm", "lr", "tokens", "tokens_per_second", "samples_per_second", "time")
_RANK: dict[str, Shape] = {
    **dict.fromkeys(("seconds", "computing", "idle", "waiting"), float),
    "waited": {str: float},
    "process": float,
}
_STRAGGLER: tuple[tuple[str, Shape], ...] = (("words", str), ("seconds", float), ("share", float))
_BYTES: Shape = {str: {str: float}}
_HEADER: dict[str, tuple[Shape, Any]] = {
    "plan": (dict, {}),
    "mesh": ({str: int}, {}),
    "versions": ({str: str}, {}),
    "process": (dict, {}),
    "world_size": (int, 0),
    "model": (str, ""),
    "device": (str, ""),
    "started": (str, ""),
}


def is_line(value: object) -> bool:
    """Whether parsed JSON is a line of a record: it has a kind, and a step unless it is the header."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return False
    return value["kind"] == "run" or fits(value.get("step"), int)


def showable(line: Line) -> Line | None:
    """`line` without values that cannot be shown; None if nothing is left of it."""
    line = {name: value for name, value in line.items() if name not in _NUMBERS or fits(value, float)}
    match line["kind"]:
        case "run" | "resume":
            return line | {name: other for name, (shape, other) in _HEADER.items() if not _has(line, name, shape)}
        case "ranks":
            return line if _all(line.get("ranks"), _is_rank) else None
        case "memory":
            return line if _all(line.get("ranks"), _is_memory) else None
        case "stragglers":
            return line if _all(line.get("found"), lambda one: all(_has(one, *name) for name in _STRAGGLER)) else None
        case "end":
            return {**line, "status": str(line.get("status")), "error": str(line.get("error") or "")}
    return line


def _has(line: Mapping[str, Any], name: str, shape: Shape) -> bool:
    return name in line and fits(line[name], shape)


def _all(rows: object, is_good: Callable[[Mapping[str, Any]], bool]) -> bool:
    return isinstance(rows, list) and all(isinstance(row, dict) and is_good(row) for row in rows)


def _is_rank(row: Mapping[str, Any]) -> bool:
    is_whole = all(_has(row, name, shape) for name, shape in _RANK.items())
    more: dict[str, Shape] = {"disk": float, "spent": {str: float}}
    return is_whole and all(name not in row or _has(row, name, shape) for name, shape in more.items())


def _is_memory(row: Mapping[str, Any]) -> bool:
    return all(name not in row or _has(row, name, _BYTES) for name in ("promised", "measured", "replicated"))
