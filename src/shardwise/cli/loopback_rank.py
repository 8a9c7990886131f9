"""One of the two ranks that `run_loopback` starts: connects to the other over loopback and checks a sum.

Rank 0 takes a free port and writes its number to the folder that both share.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.cli.rank_words import STARTED
from shardwise.system.listening import listen_at

LOOPBACK = "127.0.0.1"
NUM_RANKS = 2


def run_rank(rank: int, folder: Path, timeout: timedelta) -> int:
    """Return exit status 0 if this rank gets 3 for 1 + 2."""
    (folder / f"{STARTED}{rank}").touch()
    torch.set_num_threads(1)
    store = _open_store(folder / "port", timeout) if rank == 0 else _find_store(folder / "port", timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)
    total = torch.tensor([rank + 1.0], device="cpu")
    dist.all_reduce(total)
    dist.barrier()  # rank 0 hosts the store and must not leave while the other uses it
    dist.destroy_process_group()
    if total.item() != 3:
        print(f"the sum of 1 and 2 is {total.item()}")
        return 1
    return 0


def _open_store(note: Path, timeout: timedelta) -> TCPStore:
    listener = listen_at(LOOPBACK, 0)
    port = listener.getsockname()[1]
    descriptor = listener.detach()  # TCPStore itself would listen on all interfaces
    store = TCPStore(LOOPBACK, port, NUM_RANKS, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    draft = note.with_suffix(".draft")
    draft.write_text(str(store.port))
    draft.rename(note)
    return store


def _find_store(note: Path, timeout: timedelta) -> TCPStore:
    while not note.exists():  # the parent ends this wait
        time.sleep(0.02)
    return TCPStore(LOOPBACK, int(note.read_text()), NUM_RANKS, False, timeout)


if __name__ == "__main__":
    sys.exit(run_rank(int(sys.argv[1]), Path(sys.argv[2]), timedelta(seconds=float(sys.argv[3]))))
