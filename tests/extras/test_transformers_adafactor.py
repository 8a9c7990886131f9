"""Our Adafactor with variant="transformers", on several ranks, compared with transformers' own on the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.testing import run_ranks

SETTINGS: dict[str, dict[str, Any]] = {
    "as Trainer sets them": {"lr": 0.05, "scale_parameter": False, "relative_step": False},
    "defaults": {},
    "warm-up and decay": {"warmup_init": True, "weight_decay": 0.1},
    "first moment": {"lr": 0.01, "relative_step": False, "beta1": 0.9, "weight_decay": 0.1},
    "thresholds": {"clip_threshold": 0.5, "decay_rate": -0.6, "eps": (1e-20, 1e-2)},
}
NAMES = {"clip_threshold": "d", "decay_rate": "beta2_decay"}


def ours(model: nn.Module, settings: dict[str, Any]) -> sw.optim.Adafactor:
    named = {NAMES.get(key, key): value for key, value in settings.items()}
    return sw.optim.Adafactor(model.parameters(), **{"lr": None, **named}, variant="transformers")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.Flatten(), nn.Linear(45, 6), nn.Tanh(), nn.Linear(6, 1))


@pytest.mark.parametrize("name", SETTINGS)
def test_it_is_transformers_and_goes_on_from_its_state(name: str) -> None:
    settings = SETTINGS[name]
    inputs = [torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(step)) for step in range(6)]
    twin = model_of()
    optimizer = transformers.Adafactor(twin.parameters(), **settings)
    states: list[Any] = []
    for x in inputs:
        states.append(copy.deepcopy((twin.state_dict(), optimizer.state_dict())))
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        optimizer.step()

    first = model_of()

    def work(world: sw.World, begin: int) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(first)
        given = {} if begin else settings
        with sw.shard(model, "zero3", optimizer=ours(model, given), world=world) as engine:
            if begin:
                engine.load_state_dict(states[begin][0])
                engine.load_optimizer_state_dict(states[begin][1])
            for x in inputs[begin:]:
                engine.backward(engine(x.chunk(world.size)[world.rank]).square().mean())
                engine.step()
            return engine.state_dict()

    for begin in (0, 3):
        for params in run_ranks(3, lambda world, begin=begin: work(world, begin)):
            for key, value in twin.state_dict().items():
                assert (params[key] - value).abs().max() <= 1e-5, key
