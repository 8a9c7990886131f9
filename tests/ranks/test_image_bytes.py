"""The size of a rank's images that `explain` prints is their actual size."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.parallel.experts import MoE
from shardwise.program.image_bytes import image_bytes
from tests import inside
from tests.ranks.threads_as_members import run_members
from tests.thorough import sampled

WIDTH, NUM_RANKS, PER_PIECE = 64, 2, 3 * 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


class Mixed(Net):
    """Each rank along `ep` has experts of its own, of which some parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, WIDTH, num_experts=4, top_k=2)
        self.moe.experts.down_proj.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.moe(super().forward(x)[None])
        return result


@sampled
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zero3-kept"])
@pytest.mark.parametrize("axis", ["dp", "tp", "ep", "codes"])
def test_images_take_what_is_promised(axis: str, preset: str, precision: str, tmp_path: Path) -> None:
    start = Mixed() if axis == "ep" else Net()
    models = [copy.deepcopy(start) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> tuple[int, int, int]:
        model = models[member]
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
        plan: dict[str, Any] = {"preset": preset, "precision": precision}
        if axis == "tp":
            plan |= {"mesh": {"tp": NUM_RANKS}, "tensor": {"plan": {"layers.0": "column", "layers.1": "row"}}}
        if axis == "codes":
            plan |= {"storage": {"frozen": {"dtype": "int8", "block": 32}}}
        if axis == "ep":
            plan |= {"mesh": {"ep": NUM_RANKS}}
        engine = sw.shard(model, plan, optimizer=optimizer, world=world)
        for _ in range(3):
            engine.backward(engine(torch.ones(4, WIDTH)).float().sum())
            engine.step()
        specs = [flat.spec for flat in inside.flats(engine)]
        promised = image_bytes(specs, 2, inside.sharded(engine).mesh.coordinate(world.rank))
        held = engine.memory().image_bytes
        num_pieces = len(list(model.parameters()))
        engine.close()
        return held, promised.total, num_pieces

    for held, promised, num_pieces in run_members(NUM_RANKS, work, tmp_path).values():
        assert abs(held - promised) <= 2 * PER_PIECE * num_pieces
