"""Run by `test_jobs.py` on real processes: a small training that something happens to.

train.py FAULT OUT     FAULT: none, kill, raise, skip, restart, or "stage N"; OUT: a folder

"stage N": each rank has a stage of the model, and the one of rank N is killed in a forward in the middle of a step.
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

NUM_STEPS, NUM_MICRO_BATCHES = 8, 4


def main(fault: str, out: Path) -> None:
    torch.set_num_threads(1)
    world = sw.World.join(patience_seconds=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    in_stages = fault.startswith("stage")
    split = {"mesh": {"pp": world.size}, "accumulate": NUM_MICRO_BATCHES} if in_stages else {"preset": "zero3"}
    engine = sw.shard(model, {**split, "units": {"class": "Linear"}}, optimizer=optimizer, world=world)
    try:
        if in_stages:
            train_stages(engine, victim=int(fault.split()[1]), out=out)
        else:
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


def train_stages(engine: sw.Engine, victim: int, out: Path) -> None:
    """The victim dies in a forward in the middle of step 2, while messages to and from it are under way."""
    num_forwards = 0

    def count(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards == 2 * NUM_MICRO_BATCHES + 3:
            befall(engine, "kill", out)

    if engine.world.rank == victim:
        next(module for module in engine.module.modules() if isinstance(module, nn.Linear)).register_forward_hook(count)
    for _ in range(NUM_STEPS):
        engine.train_step(torch.ones(4 * NUM_MICRO_BATCHES, 16), loss_fn=lambda output: output.square().mean())


def befall(engine: sw.Engine, fault: str, out: Path) -> None:
    (out / "moment").write_text(str(time.time()))
    match fault:
        case "kill" | "restart":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("a bad batch")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
