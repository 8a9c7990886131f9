"""Run by `test_gloo.py` on real processes: collectives on devices over torch's real process groups, on the CPU.

Gloo's groups act in threads of their own, some time between the call and `wait`. It has all that is asked of a backend
but messages of several lengths, which only matrices take that are handed to their owners (Muon).
"""

from __future__ import annotations

import torch
from race import Transformer, race

import shardwise as sw
from shardwise.comm.joining import world_group
from shardwise.comm.process_groups import TorchGroups

CASES = [("zero3", "fp32"), ("zero2", "bf16"), ("ddp", "bf16"), ("zero1", "fp32")]


def main() -> None:
    torch.set_num_threads(1)
    world = sw.World.join(timeout_seconds=60, shares_memory=False)
    world.attach(TorchGroups("gloo", world.device, 60, world_group()))
    torch.manual_seed(world.rank)
    for preset, precision in CASES:
        race(world, Transformer(tied=True), Transformer(tied=True), preset, {"dp": world.size}, precision)
        assert world.collectives(world.device).ledger.calls
        if world.rank == 0:
            print(f"{preset} {precision}: same", flush=True)
    world.close()


if __name__ == "__main__":
    main()
