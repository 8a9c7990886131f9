"""No replica group is whole: those that are left split the layers over fewer ranks, and over as many as before when
others have come. Losses and parameters are those of the unsharded model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import llama
from split_models import TENSOR, Transformer, tokens
from torch import nn

import shardwise as sw
from shardwise.parallel.outline import smaller_meshes
from shardwise.plan import load_plan
from shardwise.plan.mesh import Mesh
from tests.ranks.lost_groups import ROWS, DiesBefore, race_of
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_groups import BLOCKS, LOOPS, POINTS, PRESETS, Frozen, plan_of, race
from tests.ranks.test_lost_ranks import DiesAt, update
from tests.ranks.test_lost_ranks_table import DiesCopying
from tests.thorough import drawn, sampled, thorough_only


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
def test_half_as_many_ranks_split_the_layers(preset: str, loop: str, tmp_path: Path) -> None:
    """Of three, one is a spare."""
    sizes = race(plan_of(preset, tp=4), DiesAt({1: 60}), tmp_path, loop=loop)
    assert sizes.keys() == {0, 2}
    assert all(4 in one and one[-1] == 2 for one in sizes.values())


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
def test_the_first_mesh_comes_back(preset: str, loop: str, tmp_path: Path) -> None:
    """With the spare and a new rank; those that had larger parts have their places of before, or others."""
    sizes = race(plan_of(preset, tp=4), DiesAt({0: 60}), tmp_path, loop=loop, num_newcomers=1, least=4)
    assert sizes.keys() == {1, 2, 3, 4}
    assert all(one[-1] == 4 for one in sizes.values())


@thorough_only("slow; smaller tests beside it cover the same code")
def test_down_to_one_rank_which_has_the_whole_model(tmp_path: Path) -> None:
    sizes = race(plan_of("zero1", tp=2), DiesAt({0: 40}), tmp_path, num_ranks=2)
    assert sizes.keys() == {1}
    assert sizes[1][-1] == 1


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_rest_of_two_groups_is_one(preset: str, rank: int, tmp_path: Path) -> None:
    """Rank 0 dies, and with its group gone another one: of another part, of its own, or the rest of its own group."""
    sizes = race(plan_of(preset), DiesAt({0: 60, rank: 90}), tmp_path)
    assert len(sizes) in (1, 2)
    assert {one[-1] for one in sizes.values()} <= {1, 2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_both_groups_lose_a_rank_at_once(preset: str, tmp_path: Path) -> None:
    """Those that are left have all parts, and are a group."""
    fault = DiesBefore(0, 2, POINTS["verdict of the group"])
    other = DiesBefore(3, 2, POINTS["verdict of the group"])

    def plant(engine: Any, member: int) -> None:
        (fault if member == 0 else other)(engine, member)

    sizes = race(plan_of(preset), plant, tmp_path)
    assert sizes.keys() == {1, 2}
    assert sizes[1][-1] == 2


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("point", [point for point in POINTS if point not in ("reduction", "waiting")])
def test_a_rank_dies_before(point: str, preset: str, rank: int, tmp_path: Path) -> None:
    fault = DiesBefore(rank, 2, POINTS[point])  # a single group reduces no gradients
    more = {"num_newcomers": rank % 2, "least": 1 + 3 * (rank % 2)}
    sizes = race(plan_of(preset, dp=1, tp=4), fault, tmp_path, **more)
    assert fault.is_dead
    assert all(one[-1] == (4 if rank % 2 else 2) for one in sizes.values())


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_dies_while_its_state_is_copied(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has its parameters after that step, and the others may have no copy of the step before any more."""
    dies = DiesCopying(monkeypatch)
    sizes = race(plan_of(preset, tp=4), dies, tmp_path)
    assert dies.died
    assert {one[-1] for one in sizes.values()} == {2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 1, "tp": 4}, {"tp": 4, "dp": 1}], ids=str)
def test_a_rank_dies_anywhere(
    mesh: dict[str, int], preset: str, loop: str, shares_memory: bool, tmp_path: Path
) -> None:
    for seed in range(drawn(1, 2)):
        draw = random.Random(f"{mesh} {preset} {loop} {shares_memory} {seed}")
        num_deaths = draw.randrange(1, 3)  # a third might come while a spare joins, which ends then
        deaths = {rank: draw.randrange(3, 100) for rank in draw.sample(range(4), num_deaths)}
        folder = tmp_path / str(seed)
        folder.mkdir()
        race(
            plan_of(preset, **mesh),
            DiesAt(deaths),
            folder,
            loop=loop,
            shares_memory=shares_memory,
            num_newcomers=draw.randrange(2) if num_deaths == 1 else 0,
        )


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_frozen_is_there_afterwards(preset: str, tmp_path: Path) -> None:
    """Nobody else has the lost rank's part of it."""
    sizes = race(plan_of(preset, tp=4), DiesAt({0: 50}), tmp_path, make=Frozen, num_newcomers=1, least=4)
    assert sizes.keys() == {1, 2, 3, 4}


@thorough_only("slow; smaller tests beside it cover the same code")
def test_parts_of_different_sizes(tmp_path: Path) -> None:
    """Three ranks share four heads, and one has all."""
    sizes = race(plan_of("zero1", tp=3), DiesAt({1: 60}), tmp_path, num_ranks=3, num_newcomers=1, least=3)
    assert sizes[0][-1] == 3


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_a_host_of_a_group_is_lost(preset: str, tmp_path: Path) -> None:
    """Where there is one group only, its ranks keep copies for those on the other host."""
    sizes = race(plan_of(preset, tp=4), HostDiesAt({1: 57}), tmp_path, hosts="aabb")
    assert sizes.keys() == {2, 3}
    assert {one[-1] for one in sizes.values()} == {2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcd"])
def test_a_rank_of_several_hosts_is_lost(hosts: str, preset: str, tmp_path: Path) -> None:
    sizes = race(plan_of(preset, tp=4), HostDiesAt({1: 57}, as_host=False), tmp_path, hosts=hosts)
    assert sizes.keys() == {0, 2}


SETTINGS: dict[str, dict[str, Any]] = {
    "sequence": {"tensor": {**TENSOR, "plan": BLOCKS, "sequence": True}},
    "clipping": {"clip_grad_norm": 1e9},
    "micro-batches": {"preset": "zero3", "accumulate": 2},
    "recomputed": {"preset": "zero3", "activations": {"policy": "recompute"}},
    "on the host": {"preset": "zero3-offload"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("setting", SETTINGS)
def test_with_other_settings_of_a_plan(setting: str, tmp_path: Path) -> None:
    sizes = race(
        {**plan_of("zero1", tp=4), **SETTINGS[setting]},
        DiesAt({2: 75}),
        tmp_path,
        loop="train_step" if setting == "micro-batches" else "engine",
        num_newcomers=1,
        least=4,
        bound=5e-2 if setting in ("bf16", "fp16") else 5e-6,
    )
    assert sizes[0][-1] == 4


class Llama:
    """The task: a model of transformers, with a plan of its own for `tp`, and fewer heads of keys than ranks."""

    def make(self) -> nn.Module:
        return llama()

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        batch = tokens(step, ROWS)
        loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
        return loss

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> torch.Tensor:
        assert (place, num) == (0, 1), "there is one group"
        loss = self.loss(engine.module, step)
        update(loop, engine, optimizer, loss)
        return loss


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_model_of_transformers(tmp_path: Path) -> None:
    plan = {"preset": "zero1", "mesh": {"tp": 4}}
    sizes = race_of(Llama(), plan, DiesAt({1: 90}), tmp_path, num_newcomers=1, least=4)
    assert sizes[0][-1] == 4


def test_meshes_that_a_model_can_have() -> None:
    def found(plan: dict[str, Any], num_ranks: int, *, has_budget: bool = False) -> Any:
        loaded = load_plan(plan)
        mesh = Mesh.of(loaded.mesh or {}, num_ranks)
        return smaller_meshes(Transformer(), loaded, mesh, has_budget=has_budget)

    assert found(plan_of("zero1", tp=4), 4).meshes == ({"tp": 4}, {"tp": 2}, {"tp": 1})
    assert found(plan_of("zero1", dp=2, tp=3), 6).meshes == ({"dp": 1, "tp": 3}, {"dp": 1, "tp": 1})
    assert found(plan_of("zero1", dp=2, tp=2), 4, has_budget=True).meshes == ({"dp": 1, "tp": 2},)
    assert found(plan_of("zero1", pp=2, tp=2), 4).meshes == ()
    none = found(plan_of("zero1", tp=2), 2, has_budget=True)
    assert none.meshes == ()
    assert "budget" in none.why_none
