"""Finds the TCP connections that gloo opened in this process, and shuts them down.

[Note: whose connections] gloo does not expose its descriptors. A connection that exists after gloo has met the others,
and did not before, may also belong to a library that another thread was using at that time. But a connection between
two ranks has its other end in another rank, with the two ports swapped. So ranks exchange what they found, and keep
what is mirrored. Nothing else is ever shut down, but for connections to an address that a caller names
(`break_connections`).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from shardwise.system.silent_connections import break_when_silent

Peer = tuple[str, int]
"""Where a connection leads: the numeric address of a host, and a port."""
_Ports = tuple[int, int]
_DESCRIPTORS = Path("/proc/self/fd")
_INTERNET = socket.AF_INET, socket.AF_INET6
_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Sockets:
    """Connected sockets, by descriptor, with the two ports by which to check that a descriptor is still that
    connection."""

    def __init__(self) -> None:
        self.ports: dict[int, _Ports] = {}
        self._ranks: dict[int, int] = {}
        """The rank at the other end, by descriptor."""

    def keep_mirrored(self, rank: int, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Drop what does not lead to another rank. All ranks call; `exchange` returns every rank's message, by rank."""
        found_by_rank = [json.loads(message) for message in exchange(json.dumps(list(self.ports.values())).encode())]
        mirrored = {
            (there, here): other for other, ports in enumerate(found_by_rank) if other != rank for here, there in ports
        }
        self.ports = {descriptor: ports for descriptor, ports in self.ports.items() if ports in mirrored}
        self._ranks = {descriptor: mirrored[ports] for descriptor, ports in self.ports.items()}

    def lost_ranks(self) -> set[int]:
        """Ranks that have closed their end, or whose process is gone. Reads nothing and does not block."""
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, _CLOSED)
        closed = [descriptor for descriptor, event in poll.poll(0) if event & _CLOSED]
        return {self._ranks[descriptor] for descriptor in closed if _is_still(descriptor, self.ports[descriptor])}

    def closed_ranks(self) -> set[int]:
        """The same, and ranks whose connection is closed at this end."""
        return self.ranks_closed_here() | self.lost_ranks()

    def ranks_closed_here(self) -> set[int]:
        """Ranks whose connection is closed at this end: gloo closes it when it finds the other end closed, but also
        when one of its waits times out."""
        return {rank for descriptor, rank in self._ranks.items() if not _is_still(descriptor, self.ports[descriptor])}

    def shut_down(self) -> None:
        """Shut each connection down, so that whatever is blocked on either end wakes. Listening sockets are never among
        them: shutting one down ends the process in gloo's own thread. No descriptor is closed, because they belong to
        gloo."""
        for descriptor, ports in self.ports.items():
            with contextlib.suppress(OSError):  # closed meanwhile
                twin = socket.socket(fileno=os.dup(descriptor))
                with contextlib.closing(twin):
                    if (twin.getsockname()[1], twin.getpeername()[1]) == ports:
                        twin.shutdown(socket.SHUT_RDWR)


def _is_still(descriptor: int, ports: _Ports) -> bool:
    """Whether a descriptor is still that connection, and not a later one."""
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
    """Make this process's connections to `port` of any host break once nothing has come over them for `seconds`.

    [Note: a store behind a dead link] A store request has no timeout of its own: if a host has vanished or a cable is
    unplugged, the request waits until the system gives up, which takes a quarter of an hour.
    """
    if not port or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for _, twin in _connections():
        with contextlib.suppress(OSError):
            if twin.getpeername()[1] == port:
                break_when_silent(twin, seconds)


def break_connections(peers: Collection[Peer]) -> int:
    """Shut down all connections of this process to these addresses, so that whatever waits for an answer wakes. Returns
    how many there were that were not shut down before. Closes no descriptor, since they belong to others."""
    wanted, num_broken = {_plain(peer) for peer in peers}, 0
    for _, twin in _connections():
        with contextlib.suppress(OSError):  # broken meanwhile
            if _plain(twin.getpeername()) in wanted and not _is_shut_down(twin):
                twin.shutdown(socket.SHUT_RDWR)
                num_broken += 1
    return num_broken


def _plain(address: Sequence[Any]) -> Peer:
    """Host and port. torch's sockets are of IPv6, and have an IPv4 address as a part of one."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])


def _is_shut_down(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))  # hung up, or broken: the system tells that unasked


@contextmanager
def opened_inside() -> Iterator[Sockets]:
    """Yields the connections that were opened inside, filled in on leaving."""
    found = Sockets()
    before = _connected()
    yield found
    found.ports = dict(_connected().items() - before.items())


def _connected() -> dict[int, _Ports]:
    """The connections of this process, by descriptor."""
    found = {}
    for descriptor, twin in _connections():
        with contextlib.suppress(OSError):  # broken meanwhile
            found[descriptor] = twin.getsockname()[1], twin.getpeername()[1]
    return found


def _connections() -> Iterator[tuple[int, socket.socket]]:
    """The connections of this process: descriptors, and sockets over a copy of each, to be used until the next one."""
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with contextlib.closing(socket.socket(fileno=os.dup(descriptor))) as twin:
                    if twin.family in _INTERNET and twin.type == socket.SOCK_STREAM:
                        twin.getpeername()
                        yield descriptor, twin


def _descriptors() -> list[int]:
    """psutil would go through the connections of the whole machine, which takes milliseconds."""
    if _DESCRIPTORS.is_dir():
        return list(map(int, os.listdir(_DESCRIPTORS)))
    return [one.fd for one in psutil.Process().net_connections(kind="tcp") if one.raddr and one.fd >= 0]
