"""Models as people have them, sharded: after three steps they have the bits of a plain loop over the half batches.

The twin goes through both half batches in turn and steps on their mean gradient. Ranks are threads. Compared are the
losses of every half and step, and all parameters at the end, bit for bit.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models_page import page
from torch import nn
from zoo import CASES, loss_of, made

import shardwise as sw
from shardwise.testing import run_ranks

NUM_STEPS, NUM_RANKS = 3, 2
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


def halves(name: str) -> list[list[dict[str, Any]]]:
    """By step, what each rank's half batch is."""
    numbers = torch.Generator().manual_seed(1)
    return [[CASES[name].inputs(numbers) for _ in range(NUM_RANKS)] for _ in range(NUM_STEPS)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3, weight_decay=0.1)


def plain(model: nn.Module, data: list[list[dict[str, Any]]]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by step and half, and the parameters at the end."""
    optimizer = adamw(model)
    losses = []
    for step in data:
        losses.append([])
        for half in step:
            loss = loss_of(model, half)
            (loss / NUM_RANKS).backward()
            losses[-1].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_plain_loop(name: str) -> None:
    warnings.simplefilter("ignore")
    start, data = made(name), halves(name)
    losses, params = plain(copy.deepcopy(start), data)
    for preset in ("zero3", "zero2"):
        replicas = [copy.deepcopy(start) for _ in range(NUM_RANKS)]

        def rank(world: sw.World, preset: str = preset, replicas: list[nn.Module] = replicas) -> Any:
            replica = replicas[world.rank]
            ours = []
            with sw.shard(replica, preset, optimizer=adamw(replica), world=world) as engine:
                for step in data:
                    loss = loss_of(replica, step[world.rank])
                    loss.backward()
                    ours.append(loss.item())
                    engine.step()
                return ours, engine.state_dict()

        ranks = run_ranks(NUM_RANKS, rank, timeout_seconds=120)
        assert [list(step) for step in zip(*(ours for ours, _ in ranks), strict=True)] == losses, preset
        different = [key for key, value in params.items() if not torch.equal(ranks[0][1][key], value)]
        assert not different, f"{preset}: {different[:5]} differ"


def test_there_are_enough_and_the_page_names_them() -> None:
    assert len(CASES) >= 80
    assert PAGE.read_text() == page(), "python tests/extras/models_page.py writes docs/models.md anew"
