"""A port for processes that a test is about to start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack


def free_port(count: int = 1) -> int:
    """The first of `count` at which nothing listens. The system gives the ports from 32768 on to whoever asks for any,
    also between this call and the start of a process; these it does not."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768 - count)
        with ExitStack() as tried:
            try:
                for place in range(count):
                    tried.enter_context(socket.socket()).bind(("", port + place))
            except OSError:
                continue
            return port
