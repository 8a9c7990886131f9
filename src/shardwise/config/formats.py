"""A plan file's text as plain values, with the line on which every key stands: what the readers have in common.

[Note: where a line number comes from]
YAML tells: its nodes carry marks. JSON's own reader does not, so a second, small walk over text that
is already known to be valid finds the keys. TOML's reader does not either; its text is cut into
statements (the fewest lines that parse on their own), and each statement is parsed alone to see which
keys it holds. Keys inside a list are not tracked: an error in there is reported at the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str, ...]
MAX_CHARS = 2**18
"""Of a plan. A file of a stranger may be made to take time, or memory, for ever; a plan is short."""
MAX_VALUES = 20_000


@dataclass(frozen=True)
class Source:
    """What a file says, and the line of every key path in it."""

    values: dict[str, Any]
    lines: dict[KeyPath, int]


class SourceError(Exception):
    """A text that cannot be meant: why, and on which line if that is known. `sources` adds the file."""

    def __init__(self, why: str, line: int | None = None) -> None:
        super().__init__(why)
        self.line = line


def as_mapping(values: object) -> dict[str, Any]:
    """The values of a file, or `SourceError` if they are no mapping."""
    if isinstance(values, Mapping):
        return dict(values)
    raise SourceError(f"a plan is a mapping of keys to values, such as 'preset: zero3', not {values!r:.60}.", 1)
