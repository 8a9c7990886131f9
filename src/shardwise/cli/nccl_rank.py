"""One rank of the all-reduce with which `shardwise doctor` tries NCCL, on one host or between several.

    python -m shardwise.cli.nccl_rank RANK NUM ADDRESS PORT SECONDS DEVICE BACKEND

DEVICE is the number of its GPU. With the backend `gloo` the tensors are on the CPU. If PORT is 0, rank 0 lets the
system pick one and prints `PORT n`; at the end it prints `RESULT {...}` with the facts of all ranks and, unless these
rule NCCL out, what each pair of ranks measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from shardwise.cli.between_rank import choose_interface, open_store
from shardwise.cli.nccl_facts import VARIABLE, obstacle
from shardwise.cli.rank_words import RESULT
from shardwise.cli.torch_facts import nccl_version
from shardwise.launch.hosts.facts import interfaces

SMALL_TIMES, LARGE_TIMES = 20, 4
LARGE_BYTES = {"cuda": 64 * 2**20, "cpu": 8 * 2**20}


def own_facts(backend: str) -> dict[str, Any]:
    """What decides whether this rank can use NCCL; with gloo, what a rank with a GPU would tell."""
    return {
        "nccl": nccl_version() if backend == "nccl" else backend,
        "gpus": torch.cuda.device_count() if backend == "nccl" else 1,
        "interfaces": sorted({one.name for one in interfaces()}),
        "chosen": os.environ.get(VARIABLE, ""),
    }


def measure(rank: int, num: int, device: torch.device) -> list[dict[str, float]]:
    """All-reduce among all ranks, whose sum is checked, then in each pair: seconds for a small tensor, and bytes per
    second for a large one, the bus bandwidth of nccl-tests. All ranks call."""
    total = torch.full((1,), rank + 1.0, device=device)
    dist.all_reduce(total)
    if total.item() != num * (num + 1) / 2:
        raise RuntimeError(f"the sum of 1 to {num} is {total.item():g}")
    rows: list[dict[str, float]] = []
    for pair in combinations(range(num), 2):
        group = dist.new_group(list(pair))  # waits for all ranks
        if rank in pair:
            found = _all_reduce_times(group, device)
            rows += [{"from": pair[0], "to": pair[1], **found}] if rank == pair[0] else []
    return rows


def _all_reduce_times(group: dist.ProcessGroup | None, device: torch.device) -> dict[str, float]:
    small = torch.zeros(1, device=device)
    large = torch.zeros(LARGE_BYTES[device.type] // 4, device=device)
    for tensor in (small, large):
        _seconds(tensor, group)  # connects, and chooses an algorithm
    latencies = [_seconds(small, group) for _ in range(SMALL_TIMES)]
    best = min(_seconds(large, group) for _ in range(LARGE_TIMES))
    # two ranks: each sends and receives the whole tensor once
    return {"latency": statistics.median(latencies), "rate": large.nbytes / best}


def _seconds(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    started = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - started


def attend(
    member: tuple[int, int, str, int], seconds: float, local: int, backend: str, say: Callable[[str], None]
) -> None:
    rank, num, address, port = member
    timeout = timedelta(seconds=seconds)
    choose_interface(rank, address)
    store = open_store(rank, num, address, port, timeout, say)
    store.set(f"facts {rank}", json.dumps(own_facts(backend)))
    facts = [json.loads(store.get(f"facts {other}")) for other in range(num)]
    rows: list[list[dict[str, float]]] = []
    if obstacle([str(other) for other in range(num)], facts) is None:
        device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num, timeout=timeout)
        store.set(f"rows {rank}", json.dumps(measure(rank, num, device)))
        rows = [json.loads(store.get(f"rows {other}")) for other in range(num)]
        dist.destroy_process_group()
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait([f"done {other}" for other in range(num)])  # this rank hosts the store
        say(f"{RESULT}{json.dumps({'facts': facts, 'rows': [row for own in rows for row in own]})}")


if __name__ == "__main__":
    number, count, where, at, limit, index, by = sys.argv[1:]
    if "NCCL_DEBUG_FILE" not in os.environ:
        os.environ["NCCL_DEBUG"] = "WARN"  # more, and the pipe that nobody reads could fill
    attend(
        (int(number), int(count), where, int(at)), float(limit), int(index), by, lambda text: print(text, flush=True)
    )
