"""Handles readers that stop reading the output of a command: `shardwise explain zero3 --world 8 | head`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

UNREAD_STATUS = 128 + signal.SIGPIPE
"""The status that a shell shows for a program ended by SIGPIPE, which Python turns into `BrokenPipeError`."""


def is_about_output(error: BaseException) -> bool:
    """Whether `error` came because the reader of our stdout or stderr is gone, and not from another pipe.

    rich turns it into a `SystemExit`, and has then closed stdout itself.
    """
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError) and any(_unread())


def let_go() -> None:
    """Discard buffered output, because Python would flush it at exit and print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _unread():
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _unread() -> Iterator[TextIO]:
    for stream in (sys.stdout, sys.stderr):
        poll = select.poll()
        try:
            poll.register(stream.fileno(), 0)  # no events requested; a missing reader is reported anyway
        except (OSError, ValueError):
            continue  # closed, or not a file
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            yield stream
