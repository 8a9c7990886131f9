"""The TCP connections that somebody else opened in this process: to know which they are, and to shut them down."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

_Ports = tuple[int, int]


class Sockets:
    """Connected sockets, by descriptor, and the two ports that tell whether a descriptor is still theirs."""

    def __init__(self) -> None:
        self.ports: dict[int, _Ports] = {}

    def shut_down(self) -> None:
        """Both ends of each see it closed, whoever is blocked on it. Listening sockets are never among them: shutting
        one down ends the process in gloo's own thread. Nothing is closed: descriptors stay their owner's."""
        for descriptor, ports in self.ports.items():
            with contextlib.suppress(OSError):  # closed meanwhile
                twin = socket.socket(fileno=os.dup(descriptor))
                with contextlib.closing(twin):
                    if (twin.getsockname()[1], twin.getpeername()[1]) == ports:
                        twin.shutdown(socket.SHUT_RDWR)


@contextmanager
def opened_inside() -> Iterator[Sockets]:
    """What is connected on leaving, and was not on entering."""
    found = Sockets()
    before = _connected()
    yield found
    found.ports = dict(_connected().items() - before.items())


def _connected() -> dict[int, _Ports]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {one.fd: (one.laddr.port, one.raddr.port) for one in connections if one.raddr and one.fd >= 0}
