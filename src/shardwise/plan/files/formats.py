"""What the readers of plan files have in common: a file's text as plain values, with the line of every key.

[Note: where a line number comes from] YAML's nodes carry marks. The JSON reader gives no positions, so a second, small
walk over the text, which is known to be valid by then, finds the keys. The TOML reader gives none either; its text is
cut into statements (the fewest lines that parse on their own), and each statement is parsed alone to see which keys it
sets. Keys inside a list are not tracked: an error in one is reported at the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str, ...]
MAX_CHARS = 2**18
"""Of a plan. A file from a stranger could be made to take endless time or memory to parse; a plan is short."""
MAX_VALUES = 20_000


@dataclass(frozen=True)
class Source:
    """The values of a file, and the line of every key path in it."""

    values: dict[str, Any]
    lines: dict[KeyPath, int]


class SourceError(Exception):
    """A text that is not a valid plan: why, and on which line if known. `sources` adds the file's name."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line


def as_mapping(values: object) -> dict[str, Any]:
    """`values` as a dict; `SourceError` if they are not a mapping."""
    if isinstance(values, Mapping):
        return dict(values)
    raise SourceError(f"a plan is a mapping of keys to values, such as 'preset: zero3', not {values!r:.60}.", 1)


def flatten(values: Mapping[str, Any]) -> dict[KeyPath, object]:
    """Every key at every depth with its value, in the order in which they were written."""
    flat: dict[KeyPath, object] = {}
    for key, value in values.items():
        flat[(key,)] = value
        if isinstance(value, Mapping):
            flat.update({(key, *rest): below for rest, below in flatten(value).items()})
    return flat
