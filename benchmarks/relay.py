"""Links with a delay, between hosts that are network namespaces: `tc netem` is not in every kernel.

    python -m benchmarks.relay --delay-ms 1 --interface eth0 10.78.0.1=/run/netns/a 10.78.0.2=/run/netns/b

Each host's interface is a TUN device whose other end is this process. It hands each packet to the host with its
destination after the delay, at no more than a link's rate, and loses what a queue of 50 ms would not hold. A line with
a rate in bits per second on its input changes the rate (0: none), which it answers.

[Note: large packets] A packet costs this process the same whatever its size, so they are as large as IP allows. With
1500 bytes it would carry 1 Gbit/s at most.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

MTU = 60_000
QUEUE_SECONDS = 0.05
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_AT_ONCE = 64


class Paths:
    """Packets on their way to hosts, and when they arrive. Pure: times are given."""

    def __init__(self, addresses: Sequence[str], delay_seconds: float) -> None:
        self.rate = 0.0
        """Bits per second to each host; 0 for no limit."""
        self.num_lost = 0
        self._delay_seconds = delay_seconds
        self._waiting: dict[bytes, deque[tuple[float, bytes]]] = {socket.inet_aton(one): deque() for one in addresses}
        self._free_at = dict.fromkeys(self._waiting, 0.0)
        """When the link to a host has carried all that was given to it."""

    def take(self, packet: bytes, now: float) -> None:
        """A packet that a host has sent. What is not for another host by IPv4 is dropped."""
        to = packet[16:20]
        if len(packet) < 20 or packet[0] >> 4 != 4 or to not in self._waiting:
            return
        begins = max(now, self._free_at[to])
        if begins - now > QUEUE_SECONDS:
            self.num_lost += 1
            return
        self._free_at[to] = begins + (len(packet) * 8 / self.rate if self.rate else 0.0)
        self._waiting[to].append((self._free_at[to] + self._delay_seconds, packet))

    def arrived(self, now: float) -> list[tuple[bytes, bytes]]:
        """Packets that have arrived by `now`, each after the address that it is for."""
        found = []
        for to, waiting in self._waiting.items():
            while waiting and waiting[0][0] <= now:
                found.append((to, waiting.popleft()[1]))
        return found

    def seconds_to_next(self, now: float) -> float | None:
        """Until the next one arrives; None if none is on its way."""
        first = [waiting[0][0] for waiting in self._waiting.values() if waiting]
        return max(0.0, min(first) - now) if first else None


def carry(tunnels: Mapping[int, bytes], paths: Paths, control: int) -> None:
    """Hand packets between `tunnels`, descriptors by address, until `control` is closed."""
    by_address = {address: tunnel for tunnel, address in tunnels.items()}
    rest = b""
    while True:
        ready, _, _ = select.select([*tunnels, control], [], [], paths.seconds_to_next(time.monotonic()))
        for tunnel in ready:
            if tunnel == control:
                said = os.read(control, 4096)
                if not said:
                    return
                *lines, rest = (rest + said).split(b"\n")
                for line in lines:
                    paths.rate = float(line)
                    sys.stdout.write("ok\n")
                    sys.stdout.flush()
                continue
            for packet in _read(tunnel):
                paths.take(packet, time.monotonic())
        for address, packet in paths.arrived(time.monotonic()):
            try:
                os.write(by_address[address], packet)
            except OSError:  # the interface is down, as a cable that is out
                paths.num_lost += 1


def _read(tunnel: int) -> list[bytes]:
    packets: list[bytes] = []
    try:
        while len(packets) < _MOST_AT_ONCE:
            packets.append(os.read(tunnel, 2**16))
    except OSError:  # there are no more, or the interface is down
        pass
    return packets


def tunnel_in(space: Path, interface: str) -> int:
    """A descriptor for the other end of `interface`, which is made in a network namespace. This process goes there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with space.open("rb") as there:
        if libc.setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"{space}: {os.strerror(ctypes.get_errno())}")
    tunnel = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tunnel, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI))
    return tunnel


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relay")
    parser.add_argument("--delay-ms", type=float, required=True)
    parser.add_argument("--interface", required=True)
    parser.add_argument("hosts", nargs="+", metavar="ADDRESS=NAMESPACE")
    args = parser.parse_args()
    hosts = dict(host.split("=", 1) for host in args.hosts)
    tunnels = {tunnel_in(Path(space), args.interface): socket.inet_aton(address) for address, space in hosts.items()}
    sys.stdout.write("ok\n")
    sys.stdout.flush()
    carry(tunnels, Paths(list(hosts), args.delay_ms / 1e3), sys.stdin.fileno())


if __name__ == "__main__":
    main()
