"""The console to which commands print their tables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.text import Text

from shardwise.system.printable import printable

FILE_WIDTH = 160
"""Columns if stdout is not a terminal and COLUMNS is not set: wide, so that tables are not folded."""


class SafeConsole(Console):
    """Prints text of files and other processes as it is: no escape sequences, markup or emoji codes in it count."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)


def console_for_output() -> SafeConsole:
    """A console for stdout, as wide as the terminal; a pipe or a file gets wider lines."""
    console = SafeConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return SafeConsole(width=FILE_WIDTH)
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
