"""Run by `test_gloo.py` on real processes: collectives on devices over torch's real process groups, on the CPU.

Gloo's groups act in threads of their own, some time between the call and `wait`. It has all that is asked of a backend
but messages of several lengths, which only matrices take that are handed to their owners (Muon).
"""

from __future__ import annotations

import torch
from preset_races import Races

import shardwise as sw
from shardwise.comm.bootstrap import world_group
from shardwise.comm.transport.process_groups import TorchGroups
from shardwise.plan.mesh import Mesh

SHELVES = [(0, torch.float32), (2, torch.float32), (4, torch.bfloat16)]
CASES = [("zero3", "fp32"), ("zero2", "bf16"), ("ddp", "bf16"), ("zero1", "fp32")]


def main() -> None:
    torch.set_num_threads(1)
    world = sw.World.join(shares_memory=False)
    world.attach(TorchGroups("gloo", world.device, 60, world_group()))
    torch.manual_seed(world.rank)
    races = Races(world)
    for preset, precision in CASES:
        races.race(preset, {"dp": world.size}, precision)
        assert world.collectives(world.device).ledger.calls
        if world.rank == 0:
            print(f"{preset} {precision}: same", flush=True)
    gather_together(world)
    world.close()


def gather_together(world: sw.World) -> None:
    """Three of two dtypes, one of which is awaited before all are begun."""
    mesh = Mesh(("dp",), (world.size,))
    collectives, group = world.collectives(world.device), world.group(mesh, "dp")
    collectives.prepare(mesh)
    fulls = [torch.zeros(2 * world.size + size, dtype=dtype) for size, dtype in SHELVES]
    for full in fulls:
        full.chunk(world.size)[world.rank].fill_(world.rank + 1)
    with collectives.together():
        works = [collectives.all_gather(full, group, "a shelf") for full in fulls[:2]]
        works[0].wait()
        works.append(collectives.all_gather(fulls[2], group, "a shelf"))
    for work in works:
        work.wait()
    for full in fulls:
        assert torch.equal(
            full,
            torch.cat([chunk.new_full(chunk.shape, rank + 1) for rank, chunk in enumerate(full.chunk(world.size))]),
        )
    if world.rank == 0:
        print("together: same", flush=True)


if __name__ == "__main__":
    main()
