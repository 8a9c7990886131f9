"""The console to which commands print their tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

FILE_WIDTH = 160
"""Columns if stdout is not a terminal and COLUMNS is not set: wide, so that tables are not folded."""


def console_for_output() -> Console:
    """A console for stdout, as wide as the terminal; a pipe or a file gets wider lines."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(width=FILE_WIDTH)
    return console


@contextmanager
def waiting_for(what: str, console: Console | None = None) -> Iterator[None]:
    """Shows on a terminal what the command waits for inside; the line is gone afterwards. `console` is that of stderr.

    There is no thread that draws, so that processes can be forked inside.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    console.print(Text(f"waiting for {what} ..."), end="\r", no_wrap=True, overflow="ellipsis")
    try:
        yield
    finally:
        console.control(Control((ControlType.ERASE_IN_LINE, 2)))
