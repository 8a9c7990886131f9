"""If gradients sum up exactly, results are bit-identical for any number of ranks, with and without deaths. So no sample
is lost or used twice, and no step is taken by some ranks only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import World
from shardwise.testing import run_ranks
from tests.faults.exact_training import Model, alone, loader, loss_of, optimizer_of
from tests.ranks.test_lost_ranks import PLANS, DiesAt, update
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import drawn, sampled

Tensor = torch.Tensor
NUM_STEPS, NUM_RANKS, NUM_NEWCOMERS = 9, 4, 2


def trained(world: World, plan: dict[str, Any], loop: str, deaths: dict[int, int], member: int) -> dict[str, Tensor]:
    """Train, and return the state after `NUM_STEPS` steps."""
    model = Model()
    optimizer = optimizer_of(model)
    engine = sw.shard(model, plan, optimizer=optimizer, world=world)
    DiesAt(deaths)(engine, member)
    accumulate = plan.get("accumulate", 1)
    state: dict[str, Tensor] = {}
    with loader(engine.data_ranks, accumulate) as batches:
        while not state:
            while engine.num_steps < NUM_STEPS:
                for batch in batches:
                    loss = loss_of(model(batch["index"], batch["x"]), batch["weight"])
                    update(loop, engine, optimizer, loss)
                    if engine.num_steps == NUM_STEPS:
                        break
            found = engine.state_dict()
            state = found if engine.num_steps == NUM_STEPS else {}
    engine.close()
    return state


def check(states: list[dict[str, Tensor]]) -> None:
    *_, (_, params) = alone(NUM_STEPS)
    assert states
    for state in states:
        for name, whole in params.items():
            assert (state[name].double() == whole).all(), (name, (state[name].double() - whole).abs().max())


@sampled
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_any_number_of_ranks_has_the_same_bits(size: int) -> None:
    draw = random.Random(size)
    plan = {"preset": draw.choice(["ddp", "zero1", "zero2", "zero3"]), "accumulate": draw.choice([1, 2])}
    check(run_ranks(size, lambda world: trained(world, plan, "engine", {}, world.rank)))


MORE: list[dict[str, Any]] = [{}, {"accumulate": 2, "clip_grad_norm": 1e9}]
CASES = [(name, more, loop) for name in PLANS for more in MORE for loop in ("engine", "plain")]


@sampled
@pytest.mark.parametrize(("name", "more", "loop"), [one for one in CASES if one[2] == "engine" or not one[1]])
def test_deaths_and_newcomers_change_no_bit(name: str, more: dict[str, Any], loop: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 6)):
        draw = random.Random(f"{name} {loop} {more} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        deaths = {member: draw.randrange(3, 120) for member in draw.sample(range(NUM_RANKS), draw.randrange(1, 4))}
        states = run_members(
            NUM_RANKS,
            lambda world, member, deaths=deaths: lived(world, {**PLANS[name], **more}, loop, deaths, member),
            folder,
            num_newcomers=NUM_NEWCOMERS,
            shares_memory=draw.random() < 0.5,
        )
        check(list(states.values()))


def lived(world: World, plan: dict[str, Any], loop: str, deaths: dict[int, int], member: int) -> dict[str, Tensor]:
    try:
        return trained(world, plan, loop, deaths, member)
    except sw.errors.FaultError as error:  # a rank that joins while another dies may end; the others continue
        raise Killed if member >= NUM_RANKS else error from None
