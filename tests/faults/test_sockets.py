"""What a fault shuts down is what leads to another rank, and nothing of anybody else."""

from __future__ import annotations

import json
import socket

from shardwise.comm.sockets import Sockets, opened_inside


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of one TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def ports(end: socket.socket) -> tuple[int, int]:
    return end.getsockname()[1], end.getpeername()[1]


def test_connections_of_other_libraries_are_left_alone() -> None:
    with opened_inside() as found:
        ours, theirs = pair()  # as between two ranks
        library, server = pair()  # as to a tracker, by another thread
    assert {ours.fileno(), library.fileno()} <= set(found.ports)
    mine = Sockets()
    mine.ports = {end.fileno(): ports(end) for end in (ours, library)}

    def exchange(message: bytes) -> list[bytes]:
        return [message, json.dumps([ports(theirs)]).encode()]

    mine.keep_mirrored(0, exchange)
    assert mine.ports == {ours.fileno(): ports(ours)}
    mine.shut_down()
    assert theirs.recv(1) == b""
    library.sendall(b"!")
    assert server.recv(1) == b"!"
    for end in (ours, theirs, library, server):
        end.close()


def test_both_ends_in_one_process_lead_to_no_other_rank() -> None:
    one, other = pair()
    mine = Sockets()
    mine.ports = {end.fileno(): ports(end) for end in (one, other)}
    mine.keep_mirrored(1, lambda message: [b"[]", message])
    assert mine.ports == {}
    one.close()
    other.close()
