"""Schedulers of torch and transformers, created before or after sharding: rates and losses equal the twin's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as of_torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup
from twins import batches, muon_groups

import shardwise as sw
from shardwise.optim import Muon
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled

NUM_STEPS = 6


def in_sequence(optimizer: torch.optim.Optimizer) -> Any:
    warm = of_torch.LinearLR(optimizer, 0.2, total_iters=2)
    cool = of_torch.CosineAnnealingLR(optimizer, T_max=4)
    return of_torch.SequentialLR(optimizer, [warm, cool], milestones=[2])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: of_torch.LambdaLR(optimizer, lambda step: 0.8**step),
    "one-cycle": lambda optimizer: of_torch.OneCycleLR(optimizer, max_lr=5e-3, total_steps=NUM_STEPS + 1),
    "warm-restarts": lambda optimizer: of_torch.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "sequential": in_sequence,
    "plateau": lambda optimizer: of_torch.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.5),
    "cosine-warmup": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, NUM_STEPS),
    "linear-warmup": lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, NUM_STEPS),
}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-5)


def muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return Muon(muon_groups(model, lr=3e-3, adamw_eps=1e-5), lr=0.01, iterate_in="fp32")


def advance(scheduler: Any, loss: float) -> None:
    scheduler.step(loss) if isinstance(scheduler, of_torch.ReduceLROnPlateau) else scheduler.step()


def plain(model: torch.nn.Module, make: Any, schedule: Any) -> tuple[list[float], list[list[float]]]:
    twin = copy.deepcopy(model)
    optimizer = make(twin)
    scheduler = schedule(optimizer)
    losses, rates = [], []
    for x, y in batches(NUM_STEPS):
        optimizer.zero_grad()
        loss = twin(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        rates.append([group["lr"] for group in optimizer.param_groups])
        advance(scheduler, losses[-1])
    return losses, rates


@sampled
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_and_losses_are_the_twins(name: str, when: str) -> None:
    make, schedule = (muon if name == "lambda" else adamw), SCHEDULERS[name]
    torch.manual_seed(0)
    model = Transformer(num_blocks=2)
    losses, rates = plain(model, make, schedule)
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> tuple[list[float], list[list[float]]]:
        replica = replicas[world.rank]
        optimizer = make(replica)
        scheduler = schedule(optimizer) if when == "before" else None
        engine = sw.shard(replica, "zero3", optimizer=optimizer, world=world)
        scheduler = scheduler or schedule(optimizer)
        own_losses, own_rates = [], []
        for x, y in batches(NUM_STEPS):
            loss = engine(*(part.chunk(2)[world.rank] for part in (x, y)))
            engine.backward(loss)
            engine.step()
            own_losses.append(engine.mean(loss.item()))
            own_rates.append([group["lr"] for group in optimizer.param_groups])
            advance(scheduler, own_losses[-1])
        engine.close()
        return own_losses, own_rates

    for own_losses, own_rates in run_ranks(2, rank):
        assert own_losses == pytest.approx(losses, rel=1e-6)
        assert own_rates == rates
    assert any(rate != rates[0] for rate in rates)
