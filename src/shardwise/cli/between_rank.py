"""One host's part in measuring links between hosts; started there by `shardwise doctor --hosts`.

    python -m shardwise.cli.between_rank RANK NUM ADDRESS PORT SECONDS

If PORT is 0, rank 0 lets the system pick one and prints `PORT n`; at the end it prints `RESULT {...}`. Every pair of
hosts in turn exchanges small messages, then large ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.cli.rank_words import RESULT
from shardwise.launch.hosts.facts import interface_of
from shardwise.system.listening import address_towards, listen_at

SMALL_TIMES, LARGE_TIMES, LARGE_BYTES = 20, 4, 8 * 2**20


def measure(rank: int, num: int) -> list[dict[str, float]]:
    """For every pair: one-way latency of a small message in seconds, bytes per second of large ones, and clock skew in
    seconds."""
    rows = []
    for first, second in combinations(range(num), 2):
        dist.barrier()
        if rank == first:
            rows.append({"from": first, "to": second, **_ask(second)})
        elif rank == second:
            _answer(first)
    return rows


def _ask(other: int) -> dict[str, float]:
    trips, skews = [], []
    told = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(SMALL_TIMES):
        sent = time.time()
        dist.send(told, other)
        dist.recv(told, other)
        back = time.time()
        trips.append(back - sent)
        skews.append(told.item() - (sent + back) / 2)
    skew = skews[trips.index(min(trips))]  # of the fastest round trip, which bounds it best
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device="cpu")
    rates = []
    for _ in range(LARGE_TIMES):
        started = time.perf_counter()
        dist.send(large, other)
        dist.recv(told, other)
        rates.append(LARGE_BYTES / (time.perf_counter() - started))
    return {"latency": statistics.median(trips) / 2, "rate": max(rates), "skew": skew}


def _answer(other: int) -> None:
    told = torch.zeros(1, dtype=torch.float64, device="cpu")
    for _ in range(SMALL_TIMES):
        dist.recv(told, other)
        told.fill_(time.time())
        dist.send(told, other)
    large = torch.zeros(LARGE_BYTES, dtype=torch.uint8, device="cpu")
    for _ in range(LARGE_TIMES):
        dist.recv(large, other)
        dist.send(told, other)


def attend(rank: int, num: int, address: str, port: int, seconds: float, say: Callable[[str], None]) -> None:
    timeout = timedelta(seconds=seconds)
    choose_interface(rank, address)
    store = open_store(rank, num, address, port, timeout, say)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num, timeout=timeout)
    store.set(f"rows {rank}", json.dumps(measure(rank, num)))
    dist.barrier()
    if rank == 0:
        rows = [row for other in range(num) for row in json.loads(store.get(f"rows {other}"))]
        say(f"{RESULT}{json.dumps(rows)}")
    dist.barrier()  # rank 0 hosts the store
    dist.destroy_process_group()


def choose_interface(rank: int, address: str) -> None:
    """Let gloo listen where the others reach this host: on the way to rank 0's `address`, as `shardwise launch` does.

    Otherwise it listens at this host's own name, which is often an address that only this host has.
    """
    own = address if rank == 0 else address_towards(address)
    with contextlib.suppress(OSError):
        interface = interface_of(socket.gethostbyname(own)) if own else ""
        if interface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def open_store(
    rank: int, num: int, address: str, port: int, timeout: timedelta, say: Callable[[str], None]
) -> TCPStore:
    """The store at rank 0, which says its port."""
    if rank > 0:
        return TCPStore(address, port, num, False, timeout, wait_for_workers=False)
    listener = listen_at(address, port)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # TCPStore itself would listen on all interfaces
    store = TCPStore(address, port, num, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    say(f"PORT {port}")
    return store


if __name__ == "__main__":
    number, count, where, at, limit = sys.argv[1:]
    attend(int(number), int(count), where, int(at), float(limit), lambda text: print(text, flush=True))
