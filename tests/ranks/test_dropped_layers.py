"""Models that skip layers at random in training (LayerDrop): each rank others, as under DDP, and equal to the plain
loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, LAYERS = 8, 3
SKIPPED = [
    [{1}, {1}],
    [{1}, {1}],
    [{1}, {1}],
    [{0}, {1, 2}],
    [set(), {0, 1, 2}],
    [set(), set()],
    [{1}, {1}],
    [{2}, {0}],
]
"""By step and rank, the layers. In the first steps no rank calls the second one: no program has it."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Dropping(nn.Module):
    """Skips layers as models of transformers do, but those that it is told to, because ranks that are threads share
    torch's random numbers."""

    def __init__(self, layerdrop: float = 0.5) -> None:
        super().__init__()
        self.layerdrop = layerdrop
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.skipped: Iterator[set[int]] = iter(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = next(self.skipped) if self.training and self.layerdrop else set()
        for number, layer in enumerate(self.layers):
            if number not in skipped:
                x = layer(x)
        return x.square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """It changes a parameter whose gradient is zero, but none that has no gradient."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


def evaluated(model: nn.Module, batch: Tensor) -> float:
    with torch.no_grad():
        value: float = model.eval()(batch).item()
    model.train()
    return value


@sampled
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("preset", ["zero3", "zero3-kept", "zero2", "ddp", "hpz"])
def test_each_rank_skips_others(preset: str, accumulate: int) -> None:
    model = Dropping()
    plain = copy.deepcopy(model)
    data = torch.randn(len(SKIPPED), 2, 4, WIDTH)
    optimizer, expected = adamw(plain), []
    for number, skipped in enumerate(SKIPPED):
        plain.skipped = iter(skipped)
        (sum(map(plain, data[number])) / 2 / accumulate).backward()
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(evaluated(plain, data[number, 0]))
    plan: dict[str, Any] = {"preset": preset, "accumulate": accumulate, "units": {"class": "Layer"}}
    if preset == "hpz":
        plan["mesh"] = {"node": 1, "local": 2}

    def work(engine: sw.Engine) -> tuple[dict[str, Tensor], list[float]]:
        model = engine.module
        model.skipped = (skipped[engine.world.rank] for skipped in SKIPPED)
        found = []
        for batch in data:
            engine.backward(model(batch[engine.world.rank]))
            engine.step()
            found.append(evaluated(model, batch[0]))
        return engine.state_dict(), found

    for state, found in work_on_ranks(2, work, plan, model, adamw, shares_memory=False):
        assert found == pytest.approx(expected, rel=1e-5)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=2e-6, msg=name)


class Talking(Dropping):
    """Its layers communicate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.SyncBatchNorm(WIDTH))


def test_layers_in_which_ranks_need_each_other_are_not_skipped() -> None:

    def work(engine: sw.Engine) -> None:
        model = engine.module
        evaluated(model, torch.ones(4, WIDTH))
        with pytest.raises(ModelError, match=r"Talking skips layers .* ranks along dp need each other there"):
            model(torch.ones(4, WIDTH))
        model.layerdrop = 0.0
        engine.backward(model(torch.ones(4, WIDTH) * (1 + engine.world.rank)))
        engine.step()

    work_on_ranks(2, work, "zero3", Talking, adamw)
