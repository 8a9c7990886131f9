"""Several engines at a time in an elastic job, such as a model and its critic: they train as elsewhere, and no rank
goes on when another is lost, because each engine would have to, and from the same step."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from small_transformers import llama
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.errors import ConfigError, FaultError
from shardwise.testing import run_ranks
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_lost_ranks import DiesAt
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import sampled

Tensor = torch.Tensor
NUM_STEPS = 4


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(16, 16), nn.Linear(16, 8)]


def engines_of(own: list[nn.Module], preset: str, world: World) -> list[sw.Engine]:
    return [
        sw.shard(model, preset, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), world=world) for model in own
    ]


def train(engines: list[sw.Engine], num_steps: int) -> list[dict[str, Tensor]]:
    for step in range(num_steps):
        for engine in engines:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            engine.backward(engine.module(x).square().mean())
            engine.step()
    return [engine.state_dict() for engine in engines]


@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3", "ddp"])
def test_two_engines_train_as_without_elasticity(preset: str, tmp_path: Path) -> None:
    """The images of the one are not those of the other."""
    given = models()

    def work(world: World, _: int = 0) -> list[dict[str, Tensor]]:
        engines = engines_of(copy.deepcopy(given), preset, world)
        states = train(engines, NUM_STEPS)
        for engine in engines:
            engine.close()
        return states

    expected = run_ranks(2, work)[0]
    for states in run_members(2, work, tmp_path).values():
        for state, other in zip(states, expected, strict=True):
            assert all(torch.equal(state[name], value) for name, value in other.items())


def test_no_rank_goes_on_with_one_of_two_engines(tmp_path: Path) -> None:
    given, fault = models(), DiesBefore(1, 2, "*verdict*")

    def work(world: World, member: int) -> str:
        engines = engines_of(copy.deepcopy(given), "zero1", world)
        fault(engines[0], member)
        try:
            with pytest.raises(FaultError) as caught:
                train(engines, NUM_STEPS)
        finally:
            for engine in engines:
                engine.close(Killed())
        return str(caught.value)

    (said,) = run_members(2, work, tmp_path).values()
    assert fault.is_dead
    assert "Rank 1" in said


def test_one_engine_after_the_other_goes_on(tmp_path: Path) -> None:
    given, fault = models(), DiesAt({1: 12})

    def work(world: World, member: int) -> int:
        for number in range(2):
            (engine,) = engines_of([copy.deepcopy(given[number])], "zero1", world)
            if number == 1:
                fault(engine, member)
            train([engine], NUM_STEPS)
            engine.close()
        return engine.world.size

    assert run_members(2, work, tmp_path) == {0: 1}


def test_a_plan_that_wants_to_survive_is_refused_beside_another_engine(tmp_path: Path) -> None:
    given = models()

    def work(world: World, _: int) -> str:
        first, second = copy.deepcopy(given)
        engine = sw.shard(first, "zero1", optimizer=torch.optim.SGD(first.parameters(), lr=0.1), world=world)
        plan = {"preset": "zero1", "survive": "host"}
        with pytest.raises(ConfigError) as caught:
            sw.shard(second, plan, optimizer=torch.optim.SGD(second.parameters(), lr=0.1), world=world)
        engine.close()
        return str(caught.value)

    for said in run_members(2, work, tmp_path).values():
        assert "survive: host is not possible: this process has several engines" in said


@pytest.mark.parametrize("is_first", [True, False])
def test_a_model_that_is_split_to_compare_with_is_lost_with_a_rank(is_first: bool, tmp_path: Path) -> None:
    """It goes on sending to those that are gone. One that each rank has whole stays as it is."""
    given, compared = models()[0], llama()

    def work(world: World, member: int) -> bool:
        own, theirs = copy.deepcopy(given), copy.deepcopy(compared)
        if is_first:
            sw.load_for_inference(model=theirs, mesh={"tp": 2}, world=world)
        engine = sw.shard(own, "zero3", optimizer=torch.optim.SGD(own.parameters(), lr=0.1), world=world)
        if not is_first:
            sw.load_for_inference(model=theirs, mesh={"tp": 2}, world=world)
        DiesAt({1: 9})(engine, member)
        with pytest.raises(FaultError, match="Rank 1"):
            train([engine], NUM_STEPS)
        return world.membership is not None and world.membership.has_several

    assert run_members(2, work, tmp_path) == {0: True}
