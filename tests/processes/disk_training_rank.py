"""Run by `test_disk_kills.py`: training with states on a disk, a checkpoint after every second step.

    disk_training_rank.py FOLDER SCRATCH STEPS [PHASE NUMBER]

The last rank is killed (SIGKILL) at the NUMBER-th event of PHASE in the step after a checkpoint, or while one is
written or read. Rank 0 prints the losses; with PHASE `waits` it says that it has begun, and waits for its standard
input to end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import read_plan, write
from shardwise.memory import DiskMemory
from shardwise.optim import host_step
from shardwise.system.disk import calls

WIDTH, LAYERS, EVERY = 48, 6, 2


class Killer:
    """Ends this process at the n-th call of something, once it is armed."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.is_armed = False

    def note(self, *_: object) -> None:
        if self.is_armed:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def before(self, holder: Any, name: str) -> None:
        """Call `note` before each call of `holder.name`."""
        original: Callable[..., Any] = getattr(holder, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            self.note()
            return original(*args, **kwargs)

        setattr(holder, name, noted)


def prepare(killer: Killer, phase: str, model: nn.Module) -> None:
    """`is_armed` is set by the loop, in a step or around a checkpoint."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    match phase:
        case "forward":
            for layer in layers:
                layer.register_forward_hook(killer.note)
        case "backward":
            for layer in layers:
                layer.register_full_backward_hook(killer.note)
        case "updating":
            killer.before(host_step, "step")
        case "reading":
            killer.before(calls.SystemCalls, "read")
        case "writing":
            killer.before(calls.SystemCalls, "write")
        case "settling":
            killer.before(DiskMemory, "finish_writes")
        case "saving":
            killer.before(write, "write_at")
        case "resuming":
            killer.before(read_plan, "_stream")


def main() -> None:
    folder, scratch, num_steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    phase, number = (sys.argv[4], int(sys.argv[5])) if len(sys.argv) > 5 else ("", 0)
    with sw.World.join() as world:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        killer = Killer(number)
        if world.rank == world.size - 1:
            prepare(killer, phase, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        units = [str(index) for index in range(LAYERS)]
        plan = {"preset": "infinity", "precision": "bf16", "units": units, "disk": scratch, "clip_grad_norm": 1.0}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            killer.is_armed = phase == "resuming"
            resumed = engine.resume(folder)
            if world.rank == 0 and resumed is not None:
                print("resumed", resumed.step, flush=True)
            if phase == "waits" and world.rank == 0:
                print("began", flush=True)
                sys.stdin.read()
            while engine.num_steps < num_steps:
                killer.is_armed = engine.num_steps == EVERY and phase not in ("saving", "resuming")
                numbers = torch.Generator().manual_seed(10 * engine.num_steps + world.rank)
                loss = engine(torch.randn(2, WIDTH, generator=numbers)).float().square().mean()
                engine.backward(loss)
                engine.step()
                mean = engine.mean(loss.item())
                if world.rank == 0:
                    print(engine.num_steps, mean.hex(), flush=True)
                killer.is_armed = phase == "saving" and engine.num_steps == 2 * EVERY
                if engine.num_steps % EVERY == 0:
                    engine.save(folder)


if __name__ == "__main__":
    main()
