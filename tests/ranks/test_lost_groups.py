"""A rank of a replica group is lost: the group leaves as a whole, the others repeat the step on the smaller mesh, and
the group comes back when it is complete. Losses and parameters are those of the unsharded model."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import TENSOR, Transformer, tokens
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.observe.run_view import read_run
from tests.ranks.lost_groups import NUM_STEPS, ROWS, DiesBefore, Plant, race_of
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt, adamw, update
from tests.ranks.threads_as_members import run_members
from tests.thorough import drawn, sampled, thorough_only

Tensor = torch.Tensor
PRESETS = ("ddp", "zero1", "zero2", "zero3")
LOOPS = ("engine", "plain", "train_step")
BLOCKS = {name: style for name, style in TENSOR["plan"].items() if name.startswith("blocks")}


class Layers:
    """The task: a model whose layers are split."""

    def __init__(self, make: Callable[[], nn.Module] = Transformer) -> None:
        self.make = make

    def loss(self, model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(tokens(step, ROWS))
        return loss

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        batch = tokens(step, ROWS).tensor_split(num)[place]
        engine.weigh(len(batch), ROWS)
        if loop == "train_step":
            return engine.train_step(batch)
        loss: Tensor = engine.module(batch)
        update(loop, engine, optimizer, loss)
        return loss


def race(
    plan: dict[str, Any], plant: Plant, folder: Path, *, make: Callable[[], nn.Module] = Transformer, **more: Any
) -> dict[int, list[int]]:
    return race_of(Layers(make), plan, plant, folder, **more)


def plan_of(preset: str, **mesh: int) -> dict[str, Any]:
    return {"preset": preset, "mesh": mesh or {"dp": 2, "tp": 2}, "tensor": TENSOR}


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_group_leaves(preset: str, loop: str, tmp_path: Path) -> None:
    sizes = race(plan_of(preset), DiesAt({1: 60}), tmp_path, loop=loop)
    assert sizes.keys() == {2, 3}
    assert all(4 in one and one[-1] == 2 for one in sizes.values())


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_group_comes_back(preset: str, loop: str, tmp_path: Path) -> None:
    """One that was a spare, and a new one, are the group; no process has ended but the killed one."""
    sizes = race(plan_of(preset), DiesAt({2: 60}), tmp_path, loop=loop, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert sizes[0][-1] == sizes[3][-1] == sizes[4][-1] == 4


POINTS = {
    "forward": "gather of activations",
    "backward": "all_reduce of activations",
    "reduction": "*reduce* blocks.1 *",
    "waiting": "wait blocks.1 *",
    "verdict of the group": "agree * verdict tp *",
    "verdict": "all_reduce of verdict",
    "commit": "exchange of commit",
    "a mean": "gather of weighed mean",
}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_before(point: str, preset: str, rank: int, tmp_path: Path) -> None:
    fault = DiesBefore(rank, 2, POINTS[point])
    sizes = race(plan_of(preset), fault, tmp_path, num_newcomers=rank % 2, least=2 + 2 * (rank % 2))
    assert fault.is_dead
    assert all(one[-1] == (4 if rank % 2 else 2) for one in sizes.values())


def test_the_others_read_what_a_spare_shares_with_them(tmp_path: Path) -> None:
    """A step is complete, with parameters that rest in shared memory: a spare has given back its own part before it is
    read."""
    fault = DiesBefore(0, 2, POINTS["commit"])
    sizes = race(plan_of("zero3"), fault, tmp_path)
    assert fault.is_dead
    assert sizes.keys() == {2, 3}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_dies_anywhere(preset: str, loop: str, shares_memory: bool, tmp_path: Path) -> None:
    for seed in range(drawn(1, 2)):
        draw = random.Random(f"{preset} {loop} {shares_memory} {seed}")
        deaths = {draw.randrange(4): draw.randrange(3, 100)}
        is_replaced = draw.random() < 0.5
        folder = tmp_path / str(seed)
        folder.mkdir()
        race(
            plan_of(preset),
            DiesAt(deaths),
            folder,
            loop=loop,
            shares_memory=shares_memory,
            num_newcomers=int(is_replaced),
            least=4 if is_replaced else 2,
        )


@thorough_only("slow; smaller tests beside it cover the same code")
def test_spares_of_two_groups_are_a_group(tmp_path: Path) -> None:
    """Without anybody new: both had the same part of the model, and one takes the other part."""
    sizes = race(plan_of("zero2", dp=3, tp=2), DiesAt({1: 40, 3: 90}), tmp_path, num_ranks=6)
    assert sizes.keys() == {0, 2, 4, 5}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
def test_two_groups_are_lost_at_once(tmp_path: Path) -> None:
    sizes = race(plan_of("zero3", dp=3, tp=2), DiesAt({0: 50, 3: 50}), tmp_path, num_ranks=6)
    assert {4, 5} < sizes.keys()
    assert sizes[4][-1] == 4


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
def test_a_mesh_with_two_data_axes(preset: str, tmp_path: Path) -> None:
    sizes = race(plan_of(preset, node=2, local=2, tp=2), DiesAt({3: 40}), tmp_path, num_ranks=8)
    assert sizes.keys() == {0, 1, 4, 5, 6, 7}
    assert sizes[0][-1] == 6


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
@pytest.mark.parametrize("as_host", [False, True], ids=["a rank", "its host"])
def test_groups_on_several_hosts(preset: str, hosts: str, as_host: bool, tmp_path: Path) -> None:
    """The images of a spare may be on a host where nobody goes on. Copies are outside of the group, so that one is
    there. Where every group is on all hosts, no host may be lost."""
    if hosts == "abab" and as_host:
        return
    sizes = race(plan_of(preset), HostDiesAt({1: 57}, as_host=as_host), tmp_path, hosts=hosts)
    assert sizes.keys() == {2, 3}
    assert sizes[2][-1] == 2


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_layers_may_be_split_over_the_outer_axis(preset: str, tmp_path: Path) -> None:
    """Then whoever comes next in the order of ranks has another part of the model, and cannot read a lost image."""
    sizes = race(plan_of(preset, tp=2, dp=2), DiesAt({2: 60}), tmp_path, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


class Frozen(Transformer):
    """Some of it is not trained: a part that is split, and one that all ranks have whole."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        for module in (self.positions, self.blocks[0].up, self.blocks[1].norm1):
            for param in module.parameters():
                param.requires_grad_(False)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_frozen_is_there_afterwards(preset: str, tmp_path: Path) -> None:
    sizes = race(plan_of(preset), DiesAt({0: 50}), tmp_path, make=Frozen, num_newcomers=1, least=4)
    assert sizes.keys() == {1, 2, 3, 4}


@thorough_only("slow; smaller tests beside it cover the same code")
def test_parts_of_different_sizes(tmp_path: Path) -> None:
    """Three ranks share four heads: their flat buffers differ in size, so that each is read by one with the same."""
    plan = plan_of("zero1", dp=2, tp=3)
    sizes = race(plan, DiesAt({4: 60}), tmp_path, num_ranks=6, num_newcomers=1, least=6)
    assert sizes[0][-1] == 6


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
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_with_other_settings_of_a_plan(setting: str, rank: int, tmp_path: Path) -> None:
    sizes = race(
        {**plan_of("zero1"), **SETTINGS[setting]},
        DiesAt({rank: 75}),
        tmp_path,
        loop="train_step" if setting == "micro-batches" else "engine",
        num_newcomers=1,
        least=4,
        bound=5e-2 if setting in ("bf16", "fp16") else 5e-6,
    )
    assert sizes[3 - rank][-1] == 4


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_record_has_each_step_once_though_who_writes_it_is_a_spare(tmp_path: Path) -> None:
    run, images = tmp_path / "run", tmp_path / "images"
    images.mkdir()
    models = [Transformer() for _ in range(5)]

    def work(world: World, member: int) -> tuple[int, int]:
        own = models[member]
        engine = sw.shard(own, {**plan_of("zero2"), "run": str(run)}, optimizer=adamw(own), world=world)
        DiesAt({1: 60})(engine, member)
        steps = 0
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            batch = tokens(step, ROWS).tensor_split(engine.data_ranks[1])[engine.data_ranks[0]]
            engine.weigh(len(batch), ROWS)
            loss = engine.train_step(batch)
            engine.log({"loss": loss.item()}, tokens=ROWS)
            steps += 1
        engine.close()
        return engine.world.rank, steps

    results = run_members(4, work, images, num_newcomers=1, least=4)
    assert results.keys() == {0, 2, 3, 4}
    assert results[0][0] >= 2, "the spare comes after those that stayed"
    view = read_run(run)
    assert [line["step"] for line in view.steps] == list(range(1, NUM_STEPS + 1))
    assert view.header["mesh"] == view.mesh == {"dp": 2, "tp": 2}
    assert view.status == "ended"
