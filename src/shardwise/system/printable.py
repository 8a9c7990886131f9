"""Text from files and other processes, made harmless for a terminal.

A terminal obeys escape sequences in what it shows: they move the cursor, change the title, or write into the input of
the shell. Characters that reverse the direction of text let a line read as another one. All that commands print of
records, checkpoints and messages goes through here; only the output of ranks is passed on as it is, because progress
bars need such characters.
"""

from __future__ import annotations

_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_DIRECTIONS = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_HARMLESS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*_CONTROLS, *_DIRECTIONS) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """`text` with a replacement character for each control character, except line breaks and tabs."""
    return text.translate(_HARMLESS)
