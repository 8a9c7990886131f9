"""The port of the store through which the ranks of a job find each other."""

from __future__ import annotations

import errno
import socket

from shardwise.errors import LaunchError

ADDRESS = "127.0.0.1"


def listen(port: int | None, address: str = ADDRESS) -> socket.socket:
    """A listening socket at `port` of `address`, by default the loopback; None is any free port.

    The store gets the socket itself, not its number, so that no other process can take the port in between.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port or 0))
        listener.listen(4096)  # all ranks connect at the same moment
    except OSError as error:
        listener.close()
        raise LaunchError(_error_text(port, address, error)) from error
    return listener


def _error_text(port: int | None, address: str, error: OSError) -> str:
    cure = "Give another --port, or leave it out to use a free one."
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {address} is taken, perhaps by an earlier run that has not ended. {cure}"
    return f"Port {port or '(any)'} of {address} cannot be opened: {error.strerror}. {cure}"
