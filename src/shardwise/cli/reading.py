"""A progress bar on the terminal while tensors are read or written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shardwise.checkpoint.formats import Spec


@contextmanager
def bar(console: Console, words: str, num_bytes: int) -> Iterator[Callable[[Spec], None]]:
    """Yields a function to call after each tensor. Draws nothing unless on a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(words, total=num_bytes)
        yield lambda spec: progress.update(task, advance=spec.num_bytes)
