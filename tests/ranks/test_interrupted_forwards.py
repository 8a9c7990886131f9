"""Ctrl-C in a notebook: the cell ends in the middle of a forward, and the next one trains on. Torch's hooks are told of
an `Exception` alone, so nothing here learns of it before the model is called again, or gradients are dropped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.system.torch_private import dispatch_modes
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Block
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, STEPS = 32, 6


class Interrupted(Block):
    """A block that Ctrl-C ends between its two halves, once."""

    when = False

    def wide(self, x: Tensor) -> Tensor:
        if self.when:
            self.when = False
            raise KeyboardInterrupt
        return super().wide(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Interrupted(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


torch.manual_seed(0)
NET = Net()


def one_by_one(model: Any, x: Tensor) -> Tensor:
    x = model.embed(x)
    for block in model.blocks:
        x = block(x)
    return model.head(x)


def cell(model: Any, optimizer: torch.optim.Optimizer, step: int, how: str) -> float:
    x = torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(step))
    if how == "evaluated":
        with torch.no_grad():
            model(x)
    out = one_by_one(model, x) if how == "one by one" else model(x)
    loss = nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(how: str, when: int | None, world: sw.World | None, plan: Any) -> list[float]:
    """The losses of cells; that of step `when` is interrupted, and run again."""
    model = copy.deepcopy(NET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    engine = sw.shard(model, plan, optimizer=optimizer, world=world) if world is not None else None
    losses = []
    for step in range(STEPS):
        if step == when:
            model.blocks[1].when = True
            with pytest.raises(KeyboardInterrupt):
                cell(model, optimizer, step, how)
            if how == "one by one":
                optimizer.zero_grad()
        losses.append(cell(model, optimizer, step, how))
    if engine is not None:
        assert not inside.runner(engine).is_computing  # or what is gathered would no longer follow a program
        engine.close()
    return losses


@sampled
@pytest.mark.parametrize("plan", ["ddp", "zero3", {"preset": "zero3", "activations": "recompute"}, "zero3-offload"])
@pytest.mark.parametrize("how", ["as a whole", "evaluated", "one by one"])
def test_a_cell_that_is_run_again_trains_as_if_it_had_not_been_interrupted(how: str, plan: Any) -> None:
    """On two ranks, which gather what they compute with; a notebook has one. In the first step, which is watched, and
    in a later one, which follows a program."""
    expected = trained(how, None, None, None)
    for when in (0, 3):
        for ranks in (1, 2):
            for losses in run_ranks(ranks, lambda world, when=when: trained(how, when, world, plan)):
                assert losses == pytest.approx(expected, abs=1e-5)


def test_a_model_that_is_made_again_is_not_watched_twice() -> None:
    """All cells are run again after the first step was interrupted; the engine of before is left as it is."""

    def rank(world: sw.World) -> int:
        left, again = copy.deepcopy(NET), copy.deepcopy(NET)
        engine = sw.shard(left, "zero3", optimizer=torch.optim.SGD(left.parameters(), 0.1), world=world)
        left.blocks[1].when = True
        with pytest.raises(KeyboardInterrupt):
            left(torch.zeros(2, 5, dtype=torch.long))
        optimizer = torch.optim.SGD(again.parameters(), 0.1)
        with sw.shard(again, "zero3", optimizer=optimizer, world=world):
            cell(again, optimizer, 0, "as a whole")
        num_watching = len(dispatch_modes())
        engine.close()
        return num_watching

    assert run_ranks(1, rank) == [0]
