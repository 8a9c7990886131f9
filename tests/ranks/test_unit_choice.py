"""Units that the user chooses: single modules, several together, lists that nobody calls; and autocast inside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import Batch, assert_rounds_like_the_plain_model, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.errors import ConfigError
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

CHOICES: dict[str, tuple[Any, list[str]]] = {
    "two blocks together": (
        {"class": "Block", "together": 2},
        ["blocks.0-blocks.1", "blocks.2"],
    ),
    "by name, far apart": (
        ["blocks.0+head", "blocks.[12]+norm"],
        ["blocks.0+head", "blocks.[12]+norm"],
    ),
    "a list that nobody calls": (["blocks"], ["blocks"]),
    "large ones in pairs": (
        {"min_numel": 2000, "together": 2},
        ["tokens-blocks.0.qkv", "blocks.0.up-blocks.0.down"],
    ),
}


@sampled
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("zero3", 3), ("zero2", 2), ("zero3-kept", 2)])
@pytest.mark.parametrize("name", CHOICES)
def test_units_of_ones_choice_train_like_the_plain_model(name: str, preset: str, num_ranks: int) -> None:
    units, expected = CHOICES[name]
    torch.manual_seed(0)
    model, data = Transformer(), batches(5, rows=12)

    def names(engine: sw.Engine) -> dict[str, Any]:
        return {"units": [unit.name for unit in inside.units(engine)]}

    run = sharded_run(model, data, preset, num_ranks, None, units=units, after=names)
    assert set(expected) <= set(run.extra["units"])
    assert_same(run, plain_run(model, data))


@pytest.mark.parametrize(
    ("units", "said"),
    [
        (["blocks.0+head", "blocks.*"], "again in another unit"),
        (["blocks", "blocks.1"], "a module around it"),
        (["blocks.0+hed"], "Did you mean 'head'?"),
        ({"class": "Block", "together": 0}, "units is"),
        ({"together": 2}, "units is"),
    ],
)
def test_units_that_cannot_be_meant_are_refused(units: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        sw.shard(Transformer(), {"units": units})
    assert said in str(raised.value)


class Autocast(nn.Module):
    """Computes a part in bf16 autocast, inside a unit."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            narrow = self.inner(x)
        return narrow.float()


@sampled
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("zero2", 2)])
@pytest.mark.parametrize("around", [False, True], ids=["inside a unit", "around the model"])
def test_autocast_computes_what_the_plain_model_computes(preset: str, num_ranks: int, around: bool) -> None:
    model = Transformer()
    if not around:
        for block in model.blocks:
            block.up = Autocast(block.up)

    def forward(model: Any, batch: Batch) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            return model(*batch)

    def step(engine: sw.Engine, _: Any, batch: Batch) -> torch.Tensor:
        loss = forward(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss

    data = batches(5, rows=12)
    run = sharded_run(model, data, preset, num_ranks, None, step=step)
    assert_rounds_like_the_plain_model(run, model, data, num_ranks=num_ranks, forward=forward)
