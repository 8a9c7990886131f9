"""A rank of a pipeline is lost: its replica group leaves with all stages, the others repeat the step on the smaller
mesh, and the group comes back when it is complete. Losses and parameters are those of the unsharded model."""

from __future__ import annotations

import copy
import math
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import TENSOR, Transformer, tokens
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.comm.generation import Regrouped
from shardwise.elastic.layouts import Layout
from shardwise.errors import ConfigError, StateError
from shardwise.testing import run_ranks
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_groups import BLOCKS, NUM_STEPS, PRESETS, ROWS, DiesBefore, Frozen, race
from tests.ranks.test_lost_ranks import DiesAt, adamw, assert_same_values
from tests.ranks.threads_as_members import ThreadMembership, run_members
from tests.thorough import drawn, sampled, soak, thorough_only

Tensor = torch.Tensor
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
race_in_stages = partial(race, loop="train_step")


def plan_of(preset: str, schedule: str = "1f1b", **mesh: int) -> dict[str, Any]:
    mesh = mesh or {"dp": 2, "pp": 2}
    split = {"tensor": TENSOR} if "tp" in mesh else {}
    return {"preset": preset, "mesh": mesh, "accumulate": 2, "pipeline": {"schedule": schedule}, **split}


def trained_alone(model: nn.Module) -> tuple[list[float], nn.Module]:
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    losses = []
    for step in range(NUM_STEPS):
        loss = plain(tokens(step, ROWS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, plain


def train(engine: sw.Engine, num_steps: int) -> None:
    while engine.num_steps < num_steps:
        batch = tokens(engine.num_steps, ROWS).tensor_split(engine.data_ranks[1])[engine.data_ranks[0]]
        engine.weigh(len(batch), ROWS)
        engine.train_step(batch)


POINTS = {
    "the batch": "exchange of activations",
    "a forward": "message of activation 1",
    "a backward": "message of gradient 0",
    "a reduction": "*reduce* blocks.*",
    "the loss": "broadcast of loss",
    "gradients of tied layers": "message of gradients",
    "the verdict": "agree * verdict *",
    "the verdict of all stages": "agree * verdict pp *",
    "the commit": "exchange of commit",
    "a mean": "gather of weighed mean",
}


@sampled
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_before(point: str, preset: str, schedule: str, rank: int, tmp_path: Path) -> None:
    """And a new one comes: it forms a group with the one that was a spare, whichever stage each of them had."""
    fault = DiesBefore(rank, 2, POINTS[point])
    sizes = race_in_stages(plan_of(preset, schedule), fault, tmp_path, num_newcomers=1, least=4)
    assert fault.is_dead
    assert sizes.keys() == {0, 1, 2, 3, 4} - {rank}
    assert all(one[-1] == 4 for one in sizes.values())


@sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_group_leaves(preset: str, schedule: str, tmp_path: Path) -> None:
    sizes = race_in_stages(plan_of(preset, schedule), DiesBefore(1, 2, "message of activation 0"), tmp_path)
    assert sizes.keys() == {2, 3}
    assert all(one == [4, 4, 2, 2, 2, 2] for one in sizes.values())


@sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("preset", PRESETS)
def test_layers_are_split_inside_of_stages(preset: str, schedule: str, tmp_path: Path) -> None:
    plan = plan_of(preset, schedule, dp=2, pp=2, tp=2)
    fault = DiesBefore(SCHEDULES.index(schedule), 2, "message of activation 1")
    sizes = race_in_stages(plan, fault, tmp_path, num_ranks=8, num_newcomers=1, least=8)
    assert fault.is_dead
    assert len(sizes) == 8
    assert all(one[-1] == 8 for one in sizes.values())


def _ranks_die(preset: str, schedule: str, mesh: dict[str, int], folder: Path, draw: random.Random) -> None:
    """One rank, perhaps with another in its place; or two, where that leaves a group in any case."""
    num_ranks = math.prod(mesh.values())
    deaths = {rank: draw.randrange(3, 60 * num_ranks) for rank in draw.sample(range(num_ranks), mesh["dp"] - 1)}
    is_replaced = len(deaths) == 1 and draw.random() < 0.5  # one that is lost while others join ends them
    folder.mkdir()
    race_in_stages(
        plan_of(preset, schedule, **mesh),
        DiesAt(deaths),
        folder,
        num_ranks=num_ranks,
        shares_memory=draw.random() < 0.7,
        num_newcomers=int(is_replaced),
        least=num_ranks if is_replaced else num_ranks // mesh["dp"],
        most_wrong=len(deaths),
    )


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_dies_anywhere(preset: str, schedule: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 2)):
        draw = random.Random(f"{preset} {schedule} {seed}")
        _ranks_die(preset, schedule, {"dp": 2, "pp": 2}, tmp_path / str(seed), draw)


@soak("draws hundreds of moments at which ranks die, and takes minutes")
@pytest.mark.parametrize("mesh", [{"dp": 2, "pp": 2}, {"dp": 3, "pp": 2}, {"dp": 2, "pp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("preset", PRESETS)
def test_ranks_die_anywhere(preset: str, schedule: str, mesh: dict[str, int], tmp_path: Path) -> None:
    for number in range(40 // math.prod(mesh.values())):
        _ranks_die(preset, schedule, mesh, tmp_path / str(number), random.Random())


def test_a_spare_lets_go_of_memory_that_others_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters rest in memory that all ranks of a host share, and are read there if images do not have them yet."""
    is_resting = threading.Event()
    come_back, complete = ThreadMembership.come_back, Layout.complete

    def rest(membership: ThreadMembership) -> Regrouped:
        is_resting.set()
        return come_back(membership)

    def complete_late(*given: Any) -> None:
        assert is_resting.wait(20)
        complete(*given)

    monkeypatch.setattr(ThreadMembership, "come_back", rest)
    monkeypatch.setattr(Layout, "complete", complete_late)
    race_in_stages(plan_of("zero3"), DiesBefore(1, 1, "exchange of commit"), tmp_path)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_spares_with_the_same_stages_are_a_group(tmp_path: Path) -> None:
    """Without anybody new: one of them takes the other stages, of whose modules it had no values."""
    deaths = DiesAt({1: 60, 3: 150})
    sizes = race_in_stages(plan_of("zero2", dp=3, pp=2), deaths, tmp_path, num_ranks=6)
    assert sizes.keys() == {0, 2, 4, 5}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("six ranks; the gate has the same of split layers")
def test_two_groups_are_lost_at_once(tmp_path: Path) -> None:
    sizes = race_in_stages(plan_of("zero3", dp=3, pp=2), DiesAt({0: 60, 3: 60}), tmp_path, num_ranks=6)
    assert {4, 5} < sizes.keys()
    assert sizes[4][-1] == 4


@thorough_only("eight ranks; the gate has the same of split layers")
@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
def test_a_mesh_with_two_data_axes(preset: str, tmp_path: Path) -> None:
    plan = plan_of(preset, node=2, local=2, pp=2)
    sizes = race_in_stages(plan, DiesAt({3: 60}), tmp_path, num_ranks=8)
    assert sizes.keys() == {0, 1, 4, 5, 6, 7}
    assert sizes[0][-1] == 6


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_stages_may_be_the_outer_axis(preset: str, tmp_path: Path) -> None:
    sizes = race_in_stages(plan_of(preset, pp=2, dp=2), DiesAt({2: 60}), tmp_path, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
@pytest.mark.parametrize("as_host", [False, True], ids=["a rank", "its host"])
def test_groups_on_several_hosts(preset: str, hosts: str, as_host: bool, tmp_path: Path) -> None:
    """Where every group is on all hosts, no host may be lost."""
    if hosts == "abab" and as_host:
        return
    sizes = race_in_stages(plan_of(preset), HostDiesAt({1: 70}, as_host=as_host), tmp_path, hosts=hosts)
    assert sizes.keys() == {2, 3}
    assert sizes[2][-1] == 2


class Counting(Transformer):
    """Its batches are counted by the model itself, whose forward runs in every stage, and by a module of one stage."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.register_buffer("count", torch.zeros(()))
        self.blocks[0].register_buffer("count", torch.zeros(()))
        self.blocks[0].register_forward_pre_hook(_count)

    def forward(self, tokens: Tensor) -> Tensor:
        _count(self)
        return super().forward(tokens)


def _count(module: nn.Module, *_: object) -> None:
    if torch.is_grad_enabled():
        assert isinstance(module.count, Tensor)
        module.count += 1


@sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_repeated_step_counts_once(rank: int, schedule: str, tmp_path: Path) -> None:
    """Micro-batches are counted, so twice as many as the unsharded model counts."""
    torch.manual_seed(3)
    model = Counting()
    models = [copy.deepcopy(model) for _ in range(5)]
    fault = DiesBefore(rank, 2, "message of gradient 1")

    def work(world: World, member: int) -> dict[str, Tensor]:
        own = models[member]
        engine = sw.shard(own, plan_of("zero1", schedule), optimizer=adamw(own), world=world)
        fault(engine, member)
        train(engine, NUM_STEPS)
        state = engine.state_dict()
        engine.close()
        return state

    results = run_members(4, work, tmp_path, num_newcomers=1, least=4)
    assert results.keys() == {0, 1, 2, 3, 4} - {rank}
    for state in results.values():
        assert state["count"] == state["blocks.0.count"] == 2 * NUM_STEPS


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_frozen_is_there_afterwards(preset: str, tmp_path: Path) -> None:
    sizes = race_in_stages(plan_of(preset), DiesAt({0: 60}), tmp_path, make=Frozen, num_newcomers=1, least=4)
    assert sizes.keys() == {1, 2, 3, 4}


SETTINGS: dict[str, dict[str, Any]] = {
    "sequence": {"mesh": {"dp": 2, "pp": 2, "tp": 2}, "tensor": {**TENSOR, "plan": BLOCKS, "sequence": True}},
    "clipping": {"clip_grad_norm": 1e9},
    "listed stages": {"pipeline": {"stages": [["embed", "positions"], ["blocks.*", "norm", "head"]]}},
    "rules": {"preset": "zero3", "rules": {"norms": {"params": ["*norm*"], "rows": {"param": {"shard": []}}}}},
    "recomputed": {"preset": "zero3", "activations": {"policy": "recompute"}},
    "on the host": {"preset": "zero3-offload"},
    "a share of units on the host": {"preset": "zero2", "offload": {"optim": 0.5}},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_with_other_settings_of_a_plan(setting: str, rank: int, tmp_path: Path) -> None:
    plan = {**plan_of("zero1"), **SETTINGS[setting]}
    num_ranks = math.prod(plan["mesh"].values())
    sizes = race_in_stages(
        plan,
        DiesAt({rank: 75}),
        tmp_path,
        num_ranks=num_ranks,
        num_newcomers=1,
        least=num_ranks,
        bound=5e-2 if setting in ("bf16", "fp16") else 5e-6,
    )
    assert sizes[3 - rank][-1] == num_ranks


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("point", ["message of activation 0", "broadcast of loss", "exchange of read"])
def test_a_rank_dies_in_an_evaluation(point: str, preset: str, tmp_path: Path) -> None:
    """The others evaluate again, and get the loss of the unsharded model."""
    torch.manual_seed(3)
    model = Transformer()
    losses, plain = trained_alone(model)
    models = [copy.deepcopy(model) for _ in range(5)]
    fault = DiesBefore(2, 2, point)
    batches = [tokens(step, ROWS) for step in range(NUM_STEPS)]

    def work(world: World, member: int) -> tuple[list[float], dict[str, Tensor]]:
        own = models[member]
        engine = sw.shard(own, plan_of(preset), optimizer=adamw(own), world=world)
        found = []
        while engine.num_steps < NUM_STEPS:
            batch = batches[engine.num_steps].tensor_split(engine.data_ranks[1])[engine.data_ranks[0]]
            engine.weigh(len(batch), ROWS)
            engine.train_step(batch)
            if engine.num_steps == 2:
                fault(engine, member)
            if engine.num_steps < NUM_STEPS:
                found.append(engine.eval_step(batches[engine.num_steps]).item() - losses[engine.num_steps])
        state = engine.state_dict()
        engine.close()
        return found, state

    results = run_members(4, work, tmp_path, num_newcomers=1, least=4)
    assert fault.is_dead
    assert results.keys() == {0, 1, 3, 4}
    for member, (found, state) in results.items():
        assert_same_values(state, plain, 5e-6)
        assert all(abs(one) < 5e-5 or (math.isnan(one) and member >= 3) for one in found)


def test_stages_that_are_sharded_along_different_axes_are_refused(tmp_path: Path) -> None:
    """One stage's states have copies on all ranks, and the other's have not: the ranks would not agree on what is
    lost."""
    rule = {"params": ["embed*", "positions*"], "rows": {"grad": {"partial": []}, "optim": {"shard": []}}}
    plan = {
        **plan_of("zero1"),
        "survive": "host",
        "rules": {"first": rule},
        "pipeline": {"stages": [["embed", "positions"], ["blocks.*", "norm", "head"]]},
    }

    def work(world: World, _: int) -> str:
        own = Transformer(tied=False)
        with pytest.raises(ConfigError) as caught:
            sw.shard(own, plan, optimizer=adamw(own), world=world)
        return str(caught.value)

    refusals = run_members(4, work, tmp_path)
    assert len(refusals) == 4
    for one in refusals.values():
        assert "survive: host is not possible: pipeline stages are sharded differently" in one


def test_calls_of_the_model_are_refused_and_name_whole_steps(tmp_path: Path) -> None:
    def work(world: World, _: int) -> str:
        own = Transformer(tied=False)
        with sw.shard(own, plan_of("zero1"), optimizer=adamw(own), world=world) as engine:
            with pytest.raises(StateError) as caught:
                own(tokens(0, ROWS))
            train(engine, 1)
        return str(caught.value)

    for one in run_members(4, work, tmp_path).values():
        assert "In a job that goes on when ranks are lost, use engine.train_step(batch)" in one


def test_a_checkpoint_after_a_rank_has_taken_other_stages(tmp_path: Path) -> None:
    """It has the states and groups of the whole model, and a plan without stages resumes it."""
    folder, images = tmp_path / "checkpoints", tmp_path / "images"
    images.mkdir()
    torch.manual_seed(3)
    model = Transformer()
    _, plain = trained_alone(model)
    models = [copy.deepcopy(model) for _ in range(5)]
    fault = DiesBefore(1, 2, "message of gradient 0")

    def work(world: World, member: int) -> bool:
        own = models[member]
        whole = dict(own.named_parameters())
        engine = sw.shard(own, plan_of("zero2"), optimizer=adamw(own), world=world)
        before = [name for name, _ in own.named_parameters()]
        others = whole.keys() - before
        assert others
        assert all(whole[name].untyped_storage().nbytes() == 4 for name in others), "they have no memory"
        fault(engine, member)
        train(engine, 4)
        engine.save(folder)
        changed = before != [name for name, _ in own.named_parameters()]
        engine.close()
        return changed

    results = run_members(4, work, images, num_newcomers=1, least=4)
    assert results[0], "the spare has taken other stages"

    def resume(world: World) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        with sw.shard(own, {"preset": "zero1", "accumulate": 2}, optimizer=adamw(own), world=world) as engine:
            engine.resume(folder)
            assert engine.num_steps == 4
            train(engine, NUM_STEPS)
            return engine.state_dict()

    assert_same_values(run_ranks(2, resume)[0], plain, 5e-6)
