"""Run by `test_four_times_memory.py` on two ranks: trains within a hard limit of private memory, and says how.

`four_times_memory.py PRESET FOLDER LIMIT`: LIMIT bytes more than what the process holds before there is a model (0: no
limit). Rank 0 prints its losses.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
from pathlib import Path

threading.stack_size(2**18)  # which is private memory, too

import torch  # noqa: E402  # threads that it starts have small stacks
from torch import nn  # noqa: E402

import shardwise as sw  # noqa: E402

WIDTH, LAYERS, NUM_STEPS = 768, 48, 3


def data_bytes() -> int:
    with Path("/proc/self/status").open() as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def warm_up(preset: str, folder: str) -> None:
    """What torch and shardwise import and allocate at their first step is no model's doing."""
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    alone = sw.World.join(environment={})
    with sw.shard(model, plan_of(preset, folder, 1), optimizer=optimizer, world=alone) as engine:
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()


def plan_of(preset: str, folder: str, num_layers: int) -> dict[str, object]:
    units = [str(unit) for unit in range(num_layers)]
    plan: dict[str, object] = {"preset": preset, "precision": "bf16", "units": units}
    if preset == "infinity":
        plan |= {"disk": folder, "rows": {"param": {"tier": "disk"}}}
    return plan


def main(preset: str, folder: str, limit: int) -> None:
    torch.set_num_threads(1)
    warm_up(preset, f"{folder}-warm-{os.environ['RANK']}")
    world = sw.World.join()
    if limit:
        allowed = data_bytes() + limit
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    torch.manual_seed(0)
    with sw.deferred_init():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with sw.shard(model, plan_of(preset, folder, LAYERS), optimizer=optimizer, world=world) as engine:
        for step in range(NUM_STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2 * step + world.rank))
            loss = (engine(x).float() - x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(world.mean(loss.item()))
        memory = engine.memory()
    on_disk = sum(memory.measured_on_disk.values())
    if world.rank == 0:
        print("told", on_disk, *losses, flush=True)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
