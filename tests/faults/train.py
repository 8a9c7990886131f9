"""Run by `test_jobs.py` on real processes: a small training that something happens to.

train.py FAULT OUT     FAULT: none, kill, raise, skip or restart; OUT: a folder
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import FaultError
from shardwise.launch import StopRequest

NUM_STEPS = 8


def main(fault: str, out: Path) -> None:
    torch.set_num_threads(1)
    world = sw.World.join(timeout_seconds=60, patience_seconds=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = sw.shard(model, {"preset": "zero3", "units": {"class": "Linear"}}, optimizer=optimizer, world=world)
    try:
        train(engine, fault, out)
    except FaultError as error:
        told = f"{time.time()}\n{error.kind} {error.ranks}\n{error}"
        (out / f"told-{world.rank}").write_text(told)
        raise


def train(engine: sw.Engine, fault: str, out: Path) -> None:
    victim = engine.world.size - 1
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if fault in ("restart", "none"):
        engine.resume(out / "checkpoints")
    with StopRequest():  # a rank that only takes note of SIGTERM has to be woken by the watch
        for step in range(engine.num_steps, NUM_STEPS):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(100 * step + engine.world.rank))
            loss = engine(x).square().mean()
            happens = step == 5 and engine.world.rank == victim and not restarted
            if happens:
                befall(engine, fault, out)
            if not (happens and fault == "skip"):
                engine.backward(loss)
            engine.step()
            if fault in ("restart", "none"):
                mean = engine.mean(loss.item())
                if engine.world.rank == 0:
                    (out / f"loss-{step}").write_text(repr(mean))
                if step % 2 == 1:
                    engine.save(out / "checkpoints")
    engine.close()
    engine.world.close()


def befall(engine: sw.Engine, fault: str, out: Path) -> None:
    (out / "moment").write_text(str(time.time()))
    match fault:
        case "kill" | "restart":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("a bad batch")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
