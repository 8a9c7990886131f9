"""When nobody reads what a command prints: `shardwise explain zero3 --world 8 | head`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

UNREAD_STATUS = 128 + signal.SIGPIPE
"""What a shell shows for a program that ended by SIGPIPE, which Python turns into `BrokenPipeError`."""


def is_about_output(error: BaseException) -> bool:
    """Whether `error` came because the reader of our stdout or stderr has gone, and not from some other pipe.

    rich makes a `SystemExit` of it, and has then closed stdout itself.
    """
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError) and any(_unread())


def let_go() -> None:
    """Have what is still in our buffers go nowhere: Python writes it at its end, and would complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _unread():
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _unread() -> Iterator[TextIO]:
    for stream in (sys.stdout, sys.stderr):
        poll = select.poll()
        try:
            poll.register(stream.fileno(), 0)  # asks for nothing; an end that has no reader is told of anyway
        except (OSError, ValueError):
            continue  # closed, or no file
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            yield stream
