"""Tables of another library's public names: what becomes of each here, and what to use instead.

A row of a module is also that of every name and module in it which has none of its own; if the module exists, such a
row is called `module.*`. Names without a row work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn


class NameStatus(Enum):
    """What becomes of a use. The values are printed in docs."""

    WORKS = "works"
    NO_EFFECT = "no effect"
    REFUSED = "not supported"


@dataclass(frozen=True)
class Row:
    """What becomes of a name, and why or what to use instead."""

    status: NameStatus
    text: str

    @property
    def said(self) -> str:
        return f"{self.status.value}: {self.text}"


def refused(text: str, owner: str, names: str) -> dict[str, Row]:
    """Rows of `names`, separated by spaces, in `owner`."""
    return _rows(NameStatus.REFUSED, text, owner, names)


def no_effect(text: str, owner: str, names: str) -> dict[str, Row]:
    """See `refused`."""
    return _rows(NameStatus.NO_EFFECT, text, owner, names)


def _rows(status: NameStatus, text: str, owner: str, names: str) -> dict[str, Row]:
    return {f"{owner}.{name}": Row(status, text) for name in names.split()}


def row_in(rows: Mapping[str, Row], name: str) -> Row | None:
    """The row of `name`, or else of the innermost module that contains it and has one; `None` if there is none."""
    if name in rows:
        return rows[name]
    while name:
        name = name.rpartition(".")[0]
        for wider in (f"{name}.*", name):
            if wider in rows:
                return rows[wider]
    return None


def refusal_of(name: str, row: Row | None) -> str | None:
    """The message of the error for `name`, if its row refuses it."""
    is_refused = row is not None and row.status is NameStatus.REFUSED
    return f"{name} is not supported by shardwise: {row.text}." if row is not None and is_refused else None


def attribute_errors(module: str, refusal: Callable[[str], str | None]) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module that scripts import as `module`; `refusal` says why a name is not there."""

    def refuse(name: str) -> NoReturn:
        raise AttributeError(refusal(f"{module}.{name}") or f"module {module!r} has no attribute {name!r}")

    return refuse


def printed(title: str, rows: Mapping[str, Row]) -> list[str]:
    """A section of a page, in which names of equal rows are together."""
    lines = [f"\n## {title}\n", "| names | here |", "|---|---|"]
    by_row: dict[Row, list[str]] = {}
    for name, row in rows.items():
        by_row.setdefault(row, []).append(name)
    return [*lines, *(f"| {listed(names)} | {row.said} |" for row, names in by_row.items())]


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
