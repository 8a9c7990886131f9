"""Ranks that were given different plans or settings: told in `shard`, or with the next verdict, before they drift."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, FaultError
from shardwise.optim import hyper_digest
from shardwise.testing import run_ranks
from tests.thorough import sampled

Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module, lr: float = 0.1, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, weight_decay=weight_decay)


def refused(plans: list[Mapping[str, object]], makes: list[Make], shares_memory: bool = True) -> list[str]:
    """What `shard` says on each rank; the model is as it was."""
    start = nn.Linear(4, 4)
    replicas = [copy.deepcopy(start) for _ in plans]

    def rank(world: sw.World) -> str:
        model = replicas[world.rank]
        with pytest.raises(ConfigError) as raised:
            sw.shard(model, plans[world.rank], optimizer=makes[world.rank](model), world=world)
        assert torch.equal(model.weight, start.weight)
        return str(raised.value)

    return run_ranks(len(plans), rank, patience_seconds=0.3, shares_memory=shares_memory)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"clip_grad_norm": 2.0}, "clip_grad_norm is 1.0 on rank 0 and 2.0 on rank 1"),
        ({"preset": "ddp"}, "preset is 'zero3' on rank 0 and 'ddp' on rank 1"),
        (
            {"preset": "hsdp", "mesh": {"node": 2, "local": 1}},
            "preset is 'zero3' on rank 0 and 'hsdp' on rank 1; mesh.",
        ),
        ({"mesh": {"dp": 5}}, "mesh.dp is None on rank 0 and 5 on rank 1"),
        ({"accumulate": 2}, "accumulate is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_another_plan_is_named(odd: dict[str, object], words: str) -> None:
    plan = {"preset": "zero3", "clip_grad_norm": 1.0}
    said = refused([plan, {**plan, **odd}], [sgd, sgd])
    assert len(set(said)) == 1
    assert said[0].startswith(f"The ranks were given different plans: {words}")


def test_how_long_to_be_patient_is_each_ranks_own() -> None:
    def rank(world: sw.World) -> None:
        sw.shard(nn.Linear(4, 4), {"preset": "ddp", "patience_seconds": 1.0 + world.rank}, world=world)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda model: torch.optim.AdamW(model.parameters(), lr=0.1), "class is 'SGD' on rank 0 and 'AdamW' on rank 1"),
        (lambda model: sgd(model, lr=0.2), "group 0 lr is 0.1 on rank 0 and 0.2 on rank 1"),
        (lambda model: sgd(model, weight_decay=0.1), "group 0 weight_decay is 0.0 on rank 0 and 0.1 on rank 1"),
    ],
)
def test_another_optimizer_is_named(odd: Make, words: str) -> None:
    said = refused([{"preset": "ddp"}] * 2, [sgd, odd])
    assert len(set(said)) == 1
    assert f"The ranks were given different optimizers: {words}" in said[0]


@sampled
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum"])
def test_a_setting_that_changes_on_one_rank(key: str, preset: str, shares_memory: bool) -> None:
    """Nothing is sent for it, and no update is made with it."""
    start = nn.Linear(4, 4)
    replicas = [copy.deepcopy(start) for _ in range(3)]

    def rank(world: sw.World) -> tuple[FaultError, int]:
        model = replicas[world.rank]
        optimizer = sgd(model)
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        engine.backward(engine(torch.ones(2, 4)).sum())
        if world.rank == 1:
            optimizer.param_groups[0][key] = 0.5
        with pytest.raises(FaultError) as raised:
            engine.step()
        return raised.value, engine.num_steps

    for error, num_steps in run_ranks(3, rank, patience_seconds=2, shares_memory=shares_memory):
        assert (error.kind, error.ranks, num_steps) == ("contradiction", (1,), 2)
        assert "there, after a step of SGD with lr 0.1 and weight_decay 0.0 (" in str(error)
        if key == "lr":
            assert "there, after a step of SGD with lr 0.5 and weight_decay 0.0 (" in str(error)


def test_schedulers_that_agree_are_no_fault() -> None:
    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        optimizer = sgd(model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        engine = sw.shard(model, "ddp", optimizer=optimizer, world=world)
        for _ in range(4):
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            schedule.step()

    run_ranks(2, rank)


def test_other_step_numbers_are_not_saved(tmp_path: Path) -> None:
    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        engine = sw.shard(model, "zero3", optimizer=sgd(model), world=world)
        with pytest.raises(ConfigError, match="step is 7 on rank 0 and 8 on rank 1"):
            engine.save(tmp_path, step=7 + world.rank)
        assert not list(tmp_path.iterdir())
        engine.save(tmp_path, step=7)

    run_ranks(2, rank)


def test_a_digest_knows_every_group_and_setting() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate} for rate in (0.1, 0.2, 0.3, 0.4)]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    before = hyper_digest(optimizer)
    assert before.startswith("a step of AdamW with lr 0.1, 0.2, 0.3, ... and weight_decay 0.01 (")
    optimizer.param_groups[3]["betas"] = (0.9, 0.99)
    assert hyper_digest(optimizer) != before
    optimizer.param_groups[3]["betas"] = (0.9, 0.95)
    assert hyper_digest(optimizer) == before
    optimizer.param_groups[1]["lr"] = torch.tensor(0.2, dtype=torch.float64)
    assert hyper_digest(optimizer) == before


def test_hosts_of_different_sizes_are_reported_if_the_mesh_depends_on_them() -> None:
    def rank(world: sw.World) -> str:
        world.local_size = 2 - world.rank
        with pytest.raises(ConfigError) as raised:
            sw.shard(nn.Linear(4, 4), "hsdp", world=world)
        return str(raised.value)

    said = run_ranks(2, rank)
    assert "LOCAL_WORLD_SIZE is 2 on rank 0 and 1 on rank 1" in said[0]
    assert (
        run_ranks(4, lambda world: str(sw.shard(nn.Linear(4, 4), "hpz", world=world).mesh), local_size=2)
        == ["node=2 x local=2"] * 4
    )
