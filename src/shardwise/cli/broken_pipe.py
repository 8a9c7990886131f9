"""Handles readers that stop reading the output of a command: `shardwise explain zero3 --world 8 | head`."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
"""The status that a shell shows for a program ended by SIGPIPE, which Python turns into `BrokenPipeError`."""


def is_about_output(error: BaseException) -> bool:
    """Whether the cause of `error` is that the reader of our stdout or stderr is gone, and not another pipe.

    rich turns such an error into a `SystemExit`, after closing stdout itself.
    """
    if isinstance(error, SystemExit):
        return isinstance(error.__context__, BrokenPipeError)
    return isinstance(error, BrokenPipeError) and any(_streams_without_reader())


def discard_output() -> None:
    """Discard buffered output, because Python would flush it at exit and print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in _streams_without_reader():
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _streams_without_reader() -> Iterator[TextIO]:
    for stream in (sys.stdout, sys.stderr):
        poll = select.poll()
        try:
            poll.register(stream.fileno(), 0)  # no events requested; a missing reader is reported anyway
        except (OSError, ValueError):
            continue  # closed, or not a file
        if any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0)):
            yield stream
