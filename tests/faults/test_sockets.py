"""What a fault shuts down is what leads to another rank, and nothing of anybody else."""

from __future__ import annotations

import json
import socket

from shardwise.comm.watch.sockets import Sockets, break_connections, opened_inside


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


def test_a_rank_that_closed_its_end_shows_without_a_message() -> None:
    """Of three: itself, one that lives and one whose process is gone."""
    ours = [pair(), pair()]
    mine = Sockets()
    mine.ports = {near.fileno(): ports(near) for near, _ in ours}

    def exchange(message: bytes) -> list[bytes]:
        return [message, *(json.dumps([ports(far)]).encode() for _, far in ours)]

    mine.keep_mirrored(0, exchange)
    assert mine.lost_ranks() == set()
    ours[1][1].close()
    assert mine.lost_ranks() == {2}
    for near, far in ours:
        near.close()
        far.close()
    assert mine.lost_ranks() == set(), "a descriptor that is not theirs any more says nothing"


def test_connections_to_an_address_are_broken_once_and_no_others() -> None:
    """Also those of torch's sockets, which are of IPv6 and have an address of IPv4."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as mapped:
            mapped.connect(("::ffff:127.0.0.1", port))
            ends = [socket.create_connection(server.getsockname()), mapped]
            kept = socket.create_connection(other.getsockname())
            accepted = [server.accept()[0] for _ in ends]
            assert break_connections([("127.0.0.1", port)]) == 2
            assert [end.recv(1) for end in ends] == [b"", b""]
            assert break_connections([("127.0.0.1", port)]) == 0
            accepted.append(other.accept()[0])
            kept.sendall(b"!")
            assert accepted[-1].recv(1) == b"!"
            for end in (*accepted, ends[0], kept):
                end.close()
