"""The TCP connections that gloo opened in this process: to know which they are, and to shut them down.

[Note: whose connections] gloo does not tell its descriptors. What is connected after it has met the others, and was not
before, may as well belong to a library that another thread was using just then. But a connection between two ranks has
its other end in another rank, with the two ports the other way round: so ranks tell each other what they found, and
keep what is mirrored. Nothing else is ever shut down.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_Ports = tuple[int, int]
_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = socket.AF_INET, socket.AF_INET6
_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Sockets:
    """Connected sockets, by descriptor, and the two ports that tell whether a descriptor is still theirs."""

    def __init__(self) -> None:
        self.ports: dict[int, _Ports] = {}
        self._ranks: dict[int, int] = {}
        """At the other end, by descriptor."""

    def keep_mirrored(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Drop what does not lead to another rank. All ranks call; `exchange` gives everybody's message, by rank."""
        told = [json.loads(message) for message in exchange(json.dumps(list(self.ports.values())).encode())]
        mirrored = {(there, here): other for other, ports in enumerate(told) if other != rank for here, there in ports}
        self.ports = {descriptor: ports for descriptor, ports in self.ports.items() if ports in mirrored}
        self._ranks = {descriptor: mirrored[ports] for descriptor, ports in self.ports.items()}

    def lost_ranks(self) -> set[int]:
        """Ranks that have closed their end, or whose process is gone. Nothing is read, and nobody blocks."""
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, _CLOSED)
        closed = [descriptor for descriptor, event in poll.poll(0) if event & _CLOSED]
        return {self._ranks[descriptor] for descriptor in closed if _is_still(descriptor, self.ports[descriptor])}

    def closed_ranks(self) -> set[int]:
        """Those, and ranks whose connection is closed at this end: gloo does that when it finds the other end closed,
        but also when a wait of its own has timed out."""
        ended = {rank for descriptor, rank in self._ranks.items() if not _is_still(descriptor, self.ports[descriptor])}
        return ended | self.lost_ranks()

    def shut_down(self) -> None:
        """Both ends of each see it closed, whoever is blocked on it. Listening sockets are never among them: shutting
        one down ends the process in gloo's own thread. Nothing is closed: descriptors stay their owner's."""
        for descriptor, ports in self.ports.items():
            with contextlib.suppress(OSError):  # closed meanwhile
                twin = socket.socket(fileno=os.dup(descriptor))
                with contextlib.closing(twin):
                    if (twin.getsockname()[1], twin.getpeername()[1]) == ports:
                        twin.shutdown(socket.SHUT_RDWR)


def _is_still(descriptor: int, ports: _Ports) -> bool:
    """Whether a descriptor is that connection, and none that was opened since."""
    try:
        twin = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False
    with contextlib.closing(twin):
        try:
            return bool(twin.getsockname()[1] == ports[0])
        except OSError:
            return False


def end_silence(port: int, seconds: float) -> None:
    """Let this process's connections to `port` of any host break once nothing has come over them for `seconds`.

    [Note: a store behind a dead link] Asking a store has no timeout of its own: where a host has vanished without a
    word, or a cable is out, the answer is waited for until the system gives up, which takes it a quarter of an hour.
    """
    if not port or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    often = max(1, int(seconds / 4))
    for descriptor, (_, there) in _connected().items():
        if there != port:
            continue
        with contextlib.suppress(OSError), contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as twin:
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, often)
            twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, often)
            twin.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


@contextmanager
def opened_inside() -> Iterator[Sockets]:
    """What is connected on leaving, and was not on entering."""
    found = Sockets()
    before = _connected()
    yield found
    found.ports = dict(_connected().items() - before.items())


def _connected() -> dict[int, _Ports]:
    """Of this process. psutil would look through all connections of the machine, which takes milliseconds."""
    if not _DESCRIPTORS.is_dir():
        connections = psutil.Process().net_connections(kind="tcp")
        return {one.fd: (one.laddr.port, one.raddr.port) for one in connections if one.raddr and one.fd >= 0}
    found = {}
    for descriptor in map(int, os.listdir(_DESCRIPTORS)):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as twin:
                    if twin.family in _INTERNET and twin.type == socket.SOCK_STREAM:
                        found[descriptor] = twin.getsockname()[1], twin.getpeername()[1]
    return found
