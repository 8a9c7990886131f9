"""One of the two ranks that `links.py` starts: times an all-gather of one large buffer."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from shardwise.comm import World


def main(out: str, num_bytes: int, repeats: int) -> None:
    """Rank 0 writes the bytes per second that each rank received, in the fastest repeat."""
    with World.join(timeout_seconds=60) as world:
        collectives = world.collectives(torch.device("cpu"))
        full = torch.zeros(num_bytes * world.size // 4, device="cpu")
        times = []
        for _ in range(repeats + 1):
            world.barrier()
            started = time.perf_counter()
            collectives.all_gather(full, world.everybody, "full").wait()
            times.append(world.mean(time.perf_counter() - started))
        if world.rank == 0:
            Path(out).write_text(json.dumps(num_bytes * (world.size - 1) / min(times[1:])))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
