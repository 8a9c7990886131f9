"""A frozen base in four bits with trainable adapters, as in QLoRA (arXiv:2305.14314). Codes are integer parameters,
which every rank keeps whole; adapters train as on the plain model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_adapters import adamw_of_trainable
from torch import nn
from twins import Transformer, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.testing import run_ranks
from tests.thorough import one_in

Tensor = torch.Tensor
BLOCK = 16
"""Elements that share a scale."""


class FourBit(nn.Module):
    """A frozen linear layer whose weight is two 4-bit codes per byte, with a scale per block; and an adapter."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.shape = base.weight.shape
        blocks = base.weight.detach().reshape(-1, BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / 7
        codes = (blocks / scales).round().add(8).to(torch.uint8).reshape(-1)
        self.codes = nn.Parameter(codes[::2] | codes[1::2] << 4, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.05)

    def weight(self) -> Tensor:
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1)
        return ((codes.to(self.scales.dtype) - 8).reshape(-1, BLOCK) * self.scales).reshape(self.shape)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight()) + self.up(self.down(x))


class Quantized(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.qkv, block.down = FourBit(block.qkv), FourBit(block.down)


def quantized() -> nn.Module:
    torch.manual_seed(0)
    return Quantized()


@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("ddp", 2), ("zero2", 3), ("zero3-offload", 2)])
@one_in(2)
def test_adapters_over_a_base_in_four_bits_train_like_the_plain_model(preset: str, num_ranks: int) -> None:
    model, data = quantized(), batches(5, rows=12)
    codes = {name: param.clone() for name, param in model.named_parameters() if name.endswith("codes")}

    def kept(engine: sw.Engine) -> dict[str, Any]:
        return {"codes": {name: engine.state_dict()[name] for name in codes}}

    run = sharded_run(model, data, preset, num_ranks, None, adamw_of_trainable, after=kept)
    assert_same(run, plain_run(model, data, adamw_of_trainable))
    for name, value in codes.items():
        assert torch.equal(run.extra["codes"][name], value), name


def test_a_base_in_four_bits_is_saved_and_resumed_by_another_world(tmp_path: Path) -> None:
    model = quantized()

    def save(world: sw.World) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        with sw.shard(mine, "zero3", optimizer=adamw_of_trainable(mine), world=world) as engine:
            engine.save(tmp_path)
            return engine.state_dict()

    def resume(world: sw.World) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        with torch.no_grad():
            for param in mine.parameters():
                param.zero_()
        with sw.shard(mine, "zero2", optimizer=adamw_of_trainable(mine), world=world) as engine:
            assert engine.resume(tmp_path) is not None
            return engine.state_dict()

    saved, resumed = run_ranks(2, save)[0], run_ranks(3, resume)[0]
    assert saved.keys() == resumed.keys()
    for name, value in saved.items():
        assert torch.equal(resumed[name], value), name
    for name, value in model.named_parameters():
        assert torch.equal(saved[name], value), name
