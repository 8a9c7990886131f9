"""One rank of `mpi`: four ways to sum one tensor, compared first, then timed in turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from shardwise.comm import World

SMALLEST_BYTES = 2**10


def main(repeats: int, largest_bytes: int, file: Path) -> None:
    with World.join(transport="mpi") as world:
        gloo = dist.new_group(backend="gloo")
        timed = []
        num_bytes = SMALLEST_BYTES
        while num_bytes <= largest_bytes:
            timed.append(_race(world, gloo, num_bytes, repeats))
            num_bytes *= 4
        if world.rank == 0:
            library = " ".join(MPI.Get_library_version().partition("\n")[0].split(",")[0].split())
            file.write_text(json.dumps({"library": library.rstrip("\0"), "timed": timed}))
        world.barrier()


def _race(world: World, gloo: Any, num_bytes: int, repeats: int) -> dict[str, Any]:
    """Raises `ValueError` if a sum is wrong. All ranks call."""
    tensor = torch.empty(num_bytes // 4)
    collectives = world.collectives(tensor.device)
    calls: dict[str, Callable[[], object]] = {
        "ours": lambda: collectives.all_reduce(tensor, tensor, world.everybody, tensor.dtype, "sum").wait(),
        "backend": lambda: dist.all_reduce(tensor),
        "gloo": lambda: dist.all_reduce(tensor, group=gloo),
        "raw": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy()),
    }
    for way, call in calls.items():
        tensor.fill_(world.rank + 1)
        call()
        if not bool((tensor == world.size * (world.size + 1) / 2).all()):
            raise ValueError(f"The sum of {num_bytes} bytes by {way} is wrong.")
    tensor.zero_()
    rounds = [{way: _seconds(world, call) for way, call in calls.items()} for _ in range(repeats)]
    return {
        "bytes": num_bytes,
        "seconds": {way: median(one[way] for one in rounds) for way in calls},
        "gloo_over_ours": median(one["gloo"] / one["ours"] for one in rounds),
    }


def _seconds(world: World, call: Callable[[], object]) -> float:
    """Of the rank that took longest, from a moment at which all were ready."""
    world.barrier()
    start = time.perf_counter()
    call()
    own = time.perf_counter() - start
    return max(float(told) for told in world.exchange(repr(own).encode()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
