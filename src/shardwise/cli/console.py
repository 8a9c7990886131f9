"""The console to which commands print their tables."""

from __future__ import annotations

import os

from rich.console import Console

FILE_WIDTH = 160
"""Columns if stdout is not a terminal and COLUMNS is not set: wide, so that tables are not folded."""


def console_for_output() -> Console:
    """A console for stdout, as wide as the terminal; a pipe or a file gets wider lines."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=FILE_WIDTH)
    return console
