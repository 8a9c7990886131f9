"""bitsandbytes' four-bit layers under adapters, as in QLoRA (arXiv:2305.14314): its codes are sharded and gathered as
they are, in whatever dtype it packs them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bitsandbytes import optim
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

Tensor = torch.Tensor
WIDTH, NUM_STEPS, NUM_RANKS = 64, 4, 2


class Adapted(nn.Module):
    """A frozen layer in NF4 with a low-rank adapter."""

    def __init__(self, storage: torch.dtype) -> None:
        super().__init__()
        self.base = Linear4bit(
            WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4", quant_storage=storage
        )
        values = nn.Linear(WIDTH, WIDTH, bias=False).weight.data
        self.base.weight = Params4bit(values, False, quant_type="nf4", quant_storage=storage, module=self.base)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def model_of(storage: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Adapted(storage) for _ in range(3)))
    return model.to("cpu")  # which quantizes


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def batches() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [(torch.randn(8, WIDTH, generator=numbers), torch.randn(8, WIDTH, generator=numbers)) for _ in range(4)]


def plain(model: nn.Module) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = copy.deepcopy(model), []
    optimizer = adamw(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "zero3-offload"])
def test_adapters_over_layers_in_four_bits_train_like_the_plain_model(preset: str, storage: torch.dtype) -> None:
    model = model_of(storage)
    replicas = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> tuple[list[float], dict[str, Any]]:
        mine, losses = replicas[world.rank], []
        with sw.shard(mine, preset, optimizer=adamw(mine), world=world) as engine:
            for x, y in batches():
                x, y = x.chunk(NUM_RANKS)[world.rank], y.chunk(NUM_RANKS)[world.rank]
                loss = (mine(x) - y).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(engine.mean(loss.item()))
            return losses, engine.state_dict()

    expected_losses, expected = plain(model)
    for losses, params in run_ranks(NUM_RANKS, rank):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, value in expected.items():
            if name.endswith("base.weight"):
                assert torch.equal(params[name].view(torch.uint8), value.view(torch.uint8)), name
            else:
                torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("optim_bits", [8, 32])
def test_optimizers_with_blocks_of_states_say_what_does_the_same(optim_bits: int) -> None:
    """Trainer's `optim="adamw_bnb_8bit"` is called as torch's own is."""
    models = [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> str:
        model = models[world.rank]
        optimizer = optim.AdamW(model.parameters(), optim_bits=optim_bits)
        with pytest.raises(ModelError, match="AdamW of bitsandbytes is not elementwise") as refused:
            sw.shard(model, "zero3", optimizer=optimizer, world=world)
        return str(refused.value)

    for said in run_ranks(NUM_RANKS, rank):
        assert "Use shardwise.optim.AdamW(state_dtype='int8')" in said
