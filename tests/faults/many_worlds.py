"""Run by `test_jobs.py`: twenty worlds, one after the other, over one store; each must leave nothing behind."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

import shardwise as sw


def main(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=PrefixStore("first", store), rank=rank, world_size=2)
    counts = []
    for _ in range(20):
        with sw.World.join(patience_seconds=1) as world:
            world.mean(1.0)
        dist.barrier()  # the other one has left the board too
        sockets = len(psutil.Process().net_connections(kind="tcp"))
        keys = sum("shardwise" in key for key in store.list_keys())
        counts.append((threading.active_count(), sockets, keys))
    (out / f"counts-{rank}").write_text(repr(counts))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
