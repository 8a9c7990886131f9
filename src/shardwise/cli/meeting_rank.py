"""One of the two ranks that `meeting.meet` starts: meets the other over loopback and checks a sum.

Rank 0 lets the system pick a free port and writes it to the folder that both share.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.cli.meeting import STARTED
from shardwise.listening import listen_at

LOOPBACK = "127.0.0.1"
NUM_RANKS = 2


def attend(rank: int, folder: Path, timeout: timedelta) -> int:
    """Returns exit status 0 if 1 + 2 is 3 on this rank."""
    (folder / f"{STARTED}{rank}").touch()
    store = _open_store(folder / "port", timeout) if rank == 0 else _find_store(folder / "port", timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=timeout)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    dist.barrier()  # rank 0 hosts the store and must not leave while the other uses it
    dist.destroy_process_group()
    if total.item() != 3:
        print(f"the sum of 1 and 2 came out as {total.item()}")
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
    sys.exit(attend(int(sys.argv[1]), Path(sys.argv[2]), timedelta(seconds=float(sys.argv[3]))))
