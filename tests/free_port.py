"""A port for processes that a test is about to start."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """One at which nothing listens. The system gives the ports from 32768 on to whoever asks for any, also between this
    call and the start of a process; these it does not."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with socket.socket() as tried:
            try:
                tried.bind(("", port))
            except OSError:
                continue
            return port
