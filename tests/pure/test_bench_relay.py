"""The relay between hosts of a benchmark: when a packet arrives, at which rate, and what is lost."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from benchmarks.hosts import shape_of
from benchmarks.relay import QUEUE_SECONDS, Paths, carry

A, B = "10.78.0.1", "10.78.0.2"


def packet(to: str, size: int = 1000) -> bytes:
    header = bytes([0x45]) + bytes(11) + socket.inet_aton(A) + socket.inet_aton(to)
    return header + os.urandom(size - len(header))


def test_a_packet_arrives_after_the_delay_and_in_order() -> None:
    paths = Paths([A, B], 0.001)
    first, second = packet(B), packet(B)
    paths.take(first, 10.0)
    paths.take(second, 10.0005)
    assert paths.seconds_to_next(10.0) == pytest.approx(0.001)
    assert paths.arrived(10.0009) == []
    assert paths.arrived(10.0011) == [(socket.inet_aton(B), first)]
    assert paths.arrived(11) == [(socket.inet_aton(B), second)]
    assert paths.seconds_to_next(11) is None


def test_a_link_carries_no_more_than_its_rate_and_each_host_has_its_own() -> None:
    paths = Paths([A, B], 0.0)
    paths.rate = 8e6  # a packet takes 1 ms
    for _ in range(10):
        paths.take(packet(B), 0.0)
    paths.take(packet(A), 0.0)
    assert len(paths.arrived(0.00501)) == 5 + 1
    assert len(paths.arrived(0.0101)) == 5
    paths.rate = 0.0
    paths.take(packet(B), 1.0)
    assert len(paths.arrived(1.0)) == 1


def test_a_queue_is_not_endless() -> None:
    paths = Paths([A, B], 0.0)
    paths.rate = 8e6
    for _ in range(1000):
        paths.take(packet(B), 0.0)
    arrived = len(paths.arrived(10))
    assert arrived == pytest.approx(QUEUE_SECONDS * 1000, abs=2)
    assert paths.num_lost == 1000 - arrived


@pytest.mark.parametrize(
    "content",
    [b"", b"\x45", packet("10.78.0.9"), packet("224.0.0.1"), b"\x60" + bytes(39)],
    ids=["nothing", "a byte", "an unknown host", "multicast", "version 6"],  # packets are drawn, names may not be
)
def test_what_is_for_no_host_is_dropped(content: bytes) -> None:
    paths = Paths([A, B], 0.0)
    paths.take(content, 0.0)
    assert paths.arrived(1.0) == []


def test_descriptors_are_connected_until_the_control_is_closed() -> None:
    ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    for _, relays in ends:
        relays.setblocking(False)
    reads, writes = os.pipe()
    tunnels = {ends[at][1].fileno(): socket.inet_aton(address) for at, address in enumerate((A, B))}
    thread = threading.Thread(target=carry, args=(tunnels, Paths([A, B], 0.02), reads))
    thread.start()
    begun, sent = time.monotonic(), packet(B)
    ends[0][0].send(sent)
    assert ends[1][0].recv(2000) == sent
    assert time.monotonic() - begun >= 0.02
    os.close(writes)
    thread.join()
    os.close(reads)
    for pair in ends:
        for end in pair:
            end.close()


@pytest.mark.parametrize(("text", "shape"), [("4", (4, 1)), ("2x2", (2, 2))])
def test_hosts_and_ranks_on_each(text: str, shape: tuple[int, int]) -> None:
    assert shape_of(text) == shape


@pytest.mark.parametrize("text", ["1", "x2", "2x0", "four", "1000", ""])
def test_what_is_no_number_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        shape_of(text)
