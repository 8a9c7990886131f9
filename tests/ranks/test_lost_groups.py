"""A rank is lost whose group shares the work along an axis: the group leaves as a whole, the others repeat the step on
the smaller mesh, and the group comes back when it is complete. Where no other group remains (`tp alone` and others),
those that are left share the work of fewer. Losses and parameters are those of the unsharded model. What one axis alone
has is in test_lost_stages.py, test_lost_sequences.py, test_lost_experts.py and test_smaller_meshes.py."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_transformers import llama, mixtral
from split_models import TENSOR, Transformer, tokens
from test_experts import TENSOR as TENSOR_BESIDE_EXPERTS
from test_experts import CutTransformer
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic import session
from shardwise.elastic.loop_state import seed_all
from shardwise.observe.run_view import read_run
from shardwise.system.data_ranks import HANDED_OUT
from shardwise.system.job_folder import LEFT_OUT
from tests.covering import covering
from tests.ranks.lost_groups import (
    AXES,
    NUM_STEPS,
    PRESETS,
    ROWS,
    WAYS,
    Axis,
    DiesBefore,
    Experts,
    Layers,
    Sequences,
    Task,
    race,
    race_of,
)
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt, adamw, update
from tests.ranks.threads_as_members import run_members
from tests.thorough import drawn, sampled, soak, thorough_only

Tensor = torch.Tensor
WITH_LOOPS = [(axis, way, loop) for axis, way in WAYS for loop in AXES[axis].loops]


def points() -> list[tuple[str, str, str, str, int]]:
    """Every point with every preset and every rank, and the ways of an axis in turn."""
    values = {
        "point": [(name, point) for name, axis in AXES.items() for point in axis.points],
        "preset": PRESETS[::-1],  # the gate takes the first: with copies on all ranks nothing lost is read
        "rank": range(4),
    }
    found = []
    for number, case in enumerate(covering(values, strength=2)):
        axis, point = case["point"]
        ways = AXES[axis].ways_with_points or tuple(AXES[axis].ways)
        found.append((axis, ways[number % len(ways)], point, case["preset"], case["rank"]))
    return found


@sampled
@pytest.mark.parametrize(("axis", "way", "point", "preset", "rank"), points())
def test_a_rank_dies_before(axis: str, way: str, point: str, preset: str, rank: int, tmp_path: Path) -> None:
    """Instead of every other one a new one comes, and forms a group with the one that was a spare."""
    fault = DiesBefore(rank, 2, *AXES[axis].points[point])
    is_replaced = rank % 2 == 1
    sizes = race(
        axis,
        preset,
        fault,
        tmp_path,
        way=way,
        loop="joined" if point == "the join" else "",
        num_newcomers=int(is_replaced),
        least=4 if is_replaced else 2,
    )
    assert fault.is_dead
    assert all(one[-1] == (4 if is_replaced else 2) for one in sizes.values())


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("axis", "way", "loop"), WITH_LOOPS)
def test_a_group_comes_back(axis: str, way: str, loop: str, preset: str, tmp_path: Path) -> None:
    """Those that were spares, and a new one, are the group; no process has ended but the killed one."""
    sizes = race(axis, preset, DiesAt({2: 60}), tmp_path, way=way, loop=loop, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert all(one[-1] == 4 for one in sizes.values())


@thorough_only("test_a_rank_dies_before has it, for one loop")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(("axis", "way", "loop"), WITH_LOOPS)
def test_a_group_leaves(axis: str, way: str, loop: str, preset: str, tmp_path: Path) -> None:
    sizes = race(axis, preset, DiesAt({1: 60}), tmp_path, way=way, loop=loop)
    assert sizes.keys() == ({2, 3} if AXES[axis].has_groups else {0, 2}), "of three in one group, one is a spare"
    assert all(4 in one and one[-1] == 2 for one in sizes.values())


def begun(axis: str) -> tuple[Axis, Task, list[nn.Module]]:
    """How groups along `axis` are tried, what they are trained on, and its model for four ranks and one that joins."""
    torch.manual_seed(3)
    own = AXES[axis]
    task = own.ways[own.usual][0]()
    start = task.make()
    return own, task, [copy.deepcopy(start) for _ in range(5)]


@sampled
@pytest.mark.parametrize("asks", ["with a batch in hand", "after the step", "both"])
@pytest.mark.parametrize("axis", ["tp", "pp", "sp"])
@pytest.mark.parametrize("nth", [1, 2])
def test_the_loader_of_a_spare_goes_where_the_others_are(axis: str, asks: str, nth: int, tmp_path: Path) -> None:
    """Its group has lost a rank while it had a batch in hand, or had taken it; so it comes back with a batch from where
    it was then, which trains nothing."""
    own, task, models = begun(axis)
    rows = len(task.batches) if isinstance(task, Sequences) else NUM_STEPS
    fault = DiesBefore(1, 2, "exchange of any_rank", nth if asks == "both" else 1)

    def work(world: World, member: int) -> dict[int, set[int]]:
        optimizer = adamw(models[member])
        engine = sw.shard(models[member], own.plan("zero2"), optimizer=optimizer, world=world)
        fault(engine, member)
        order = sw.data.Samples(shuffle=False)
        steps = [[step] for step in range(rows) for _ in range(ROWS)]
        loader = sw.data.Loader(steps, batch_rows=ROWS, world=engine.data_ranks, steps=NUM_STEPS, samples=order)
        given: dict[int, set[int]] = {}
        for (numbers,) in loader:
            if asks != "after the step":
                engine.any_rank(False)
            step, void = engine.num_steps, engine.num_void
            task.take_step("train_step", engine, optimizer, int(numbers[0]), *engine.data_ranks)
            if engine.num_steps > step and engine.num_void == void:
                given.setdefault(step, set()).update(numbers.tolist())
            if asks != "with a batch in hand":
                engine.any_rank(False)
        engine.close()
        return given

    results = run_members(4, work, tmp_path, shares_memory=True, num_newcomers=1, least=4, not_before=4)
    assert fault.is_dead
    assert results.keys() == {0, 2, 3, 4}
    for given in results.values():
        assert all(numbers == {step} for step, numbers in given.items()), given


class Counter:
    """A loop's own object."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]


@thorough_only("moments of a loss, of which test_a_group_comes_back has one")
@sampled
@pytest.mark.parametrize("point", ["exchange of any_rank", "all_reduce of verdict", "exchange of commit"])
@pytest.mark.parametrize("axis", ["tp", "pp", "sp"])
def test_what_a_spare_counts_is_what_the_others_do(axis: str, point: str, tmp_path: Path) -> None:
    """It comes back in the middle of its loop, where steps jump: a loop that counts what it has taken counts that as
    one, and what it was given since its last step is not what it is trained with now."""
    own, task, models = begun(axis)
    rows = len(task.batches) if isinstance(task, Sequences) else NUM_STEPS
    fault = DiesBefore(1, 2, point)

    def work(world: World, member: int) -> list[int]:
        optimizer = adamw(models[member])
        engine = sw.shard(models[member], own.plan("zero2"), optimizer=optimizer, world=world)
        engine.remember(counter=(counter := Counter()))
        fault(engine, member)
        order = sw.data.Samples(shuffle=False)
        steps = [[step] for step in range(rows) for _ in range(ROWS)]
        loader = sw.data.Loader(steps, batch_rows=ROWS, world=engine.data_ranks, steps=NUM_STEPS, samples=order)
        engine.remember(loader=loader)
        counted = []
        for (numbers,) in loader:
            step, void = engine.num_steps, engine.num_void
            engine.any_rank(False)
            task.take_step("train_step", engine, optimizer, int(numbers[0]), *engine.data_ranks)
            counter.num_steps += engine.num_steps > step
            if engine.num_steps > step and engine.num_void == void:
                assert f"of the batch of step {step}" in HANDED_OUT.of_step()
                counted.append(counter.num_steps - step)
        engine.close()
        return counted

    results = run_members(4, work, tmp_path, shares_memory=True, num_newcomers=1, least=4, not_before=4)
    assert fault.is_dead
    assert results.keys() == {0, 2, 3, 4}
    assert {one for counted in results.values() for one in counted} == {1}


@thorough_only("two things after each other; the tests beside it have each")
@sampled
@pytest.mark.parametrize("axis", ["tp", "pp", "sp"])
def test_a_batch_that_was_left_out_before_a_spare_came_back_is_left_out_once(axis: str, tmp_path: Path) -> None:
    """The other group is lost in the step of which it was: the spare goes on with one that has just joined."""
    torch.manual_seed(3)
    own, bad = AXES[axis], 4
    task = own.ways[own.usual][0]()
    start = task.make()
    models = [copy.deepcopy(start) for _ in range(5)]
    fault = DiesBefore(1, 2, "exchange of any_rank")

    def work(world: World, member: int) -> dict[int, set[int]]:
        optimizer, plan = adamw(models[member]), {**own.plan("zero2"), "bad_batch": "skip"}
        engine = sw.shard(models[member], plan, optimizer=optimizer, world=world)
        fault(engine, member)
        steps = [[step] for step in range(NUM_STEPS + 1) for _ in range(ROWS)]
        order = sw.data.Samples(shuffle=False)
        loader = sw.data.Loader(steps, batch_rows=ROWS, world=engine.data_ranks, steps=NUM_STEPS + 1, samples=order)
        given: dict[int, set[int]] = {}
        for (numbers,) in loader:
            if (member, engine.num_steps, engine.world.size) == (2, bad - 1, 2):
                (tmp_path / LEFT_OUT).write_text(f"[{bad}]")  # as a launcher does
            if (member, engine.num_steps, engine.world.size) == (3, bad, 4):
                DiesAt({3: 2})(engine, member)  # when all have begun the step
            engine.any_rank(False)
            step, void = engine.num_steps, engine.num_void
            task.take_step("train_step", engine, optimizer, step, *engine.data_ranks)
            if engine.num_steps > step and engine.num_void == void:
                given.setdefault(step, set()).update(numbers.tolist())
            if engine.num_steps == NUM_STEPS:
                break
        engine.close()
        return given

    results = run_members(4, work, tmp_path, shares_memory=True, num_newcomers=1, not_before=bad - 1)
    assert results.keys() == {0, 4}
    for given in results.values():
        assert all(numbers == {step + (step >= bad)} for step, numbers in given.items()), given


@sampled
@pytest.mark.parametrize("axis", ["tp", "pp", "sp"])
def test_those_that_form_a_group_draw_the_same(axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them was a spare, and has drawn more than the other. What they draw is not compared: threads share the
    generators, and other ranks restore them meanwhile."""
    numbers: list[int] = []

    def noting(number: int) -> None:
        numbers.append(number)
        seed_all(number)

    monkeypatch.setattr(session, "seed_all", noting)
    race(axis, "zero1", DiesAt({2: 60}), tmp_path, num_newcomers=1, least=4)
    assert len(numbers) == 2
    assert len(set(numbers)) == 1


def test_each_generator_that_a_void_iteration_restores_is_seeded() -> None:
    drawn_twice = []
    for _ in range(2):
        seed_all(7)
        drawn_twice.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn_twice[0] == drawn_twice[1]


def test_the_others_read_what_a_spare_shares_with_them(tmp_path: Path) -> None:
    """A step is complete, with parameters that rest in shared memory: a spare has given back its own part before it is
    read."""
    fault = DiesBefore(0, 2, "exchange of commit")
    sizes = race("tp", "zero3", fault, tmp_path)
    assert fault.is_dead
    assert sizes.keys() == {2, 3}


def _ranks_die(axis: str, way: str, mesh: dict[str, int], folder: Path, draw: random.Random) -> None:
    """At any collective, also of a recovery: one, perhaps with another in its place, or as many as there may be. Six
    ranks with experts have different numbers of rows, which is refused in a plain loop."""
    own, num_ranks, num_groups = AXES[axis], math.prod(mesh.values()), mesh.get("dp", 1)
    most = num_groups - 1 if own.has_groups else 2  # a third might come while a spare joins, which ends then
    deaths = {
        rank: draw.randrange(3, own.num_calls * num_ranks // 4)
        for rank in draw.sample(range(num_ranks), draw.randint(1, most))
    }
    is_replaced = len(deaths) == 1 and draw.random() < 0.5  # one that is lost while others join ends them
    folder.mkdir()
    race(
        axis,
        draw.choice(PRESETS),
        DiesAt(deaths),
        folder,
        way=way,
        mesh=mesh,
        loop=draw.choice([loop for loop in own.loops if loop != "plain" or axis != "ep" or num_ranks != 6]),
        settings={"tensor": TENSOR} if "tp" in mesh else {},
        shares_memory=draw.random() < 0.6,
        num_newcomers=int(is_replaced),
        least=num_ranks if is_replaced else num_ranks // num_groups if own.has_groups else 1,
        most_wrong=len(deaths),
        fades=True,
    )


def _meshes(axis: str) -> list[dict[str, int]]:
    own = AXES[axis].mesh
    alone = {name: size for name, size in own.items() if name != "dp"}
    return [own, dict(reversed(own.items())), *([] if AXES[axis].has_groups else [alone])]


@thorough_only("drawn moments; test_a_rank_dies_before has fixed ones")
@sampled
@pytest.mark.parametrize(("axis", "way"), WAYS)
def test_a_rank_dies_anywhere(axis: str, way: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 8)):
        draw = random.Random(f"{axis} {way} {seed}")
        _ranks_die(axis, way, draw.choice(_meshes(axis)), tmp_path / str(seed), draw)


@soak("draws hundreds of moments at which ranks die, and takes minutes")
@pytest.mark.parametrize(("axis", "way"), WAYS)
def test_ranks_die_anywhere(axis: str, way: str, tmp_path: Path) -> None:
    meshes = _meshes(axis)
    if AXES[axis].has_groups:
        meshes += [{"dp": 3, axis: 2}]
    if axis == "pp":
        meshes += [{"dp": 2, "pp": 2, "tp": 2}]
    if axis == "ep":
        meshes += [{"dp": 2, "ep": 3}]
    for _ in range(30):
        seed = random.SystemRandom().randrange(10**9)
        print(f"seed {seed}")  # pytest shows it where this fails
        draw = random.Random(seed)
        _ranks_die(axis, way, draw.choice(meshes), tmp_path / str(seed), draw)


@thorough_only("six ranks")
@pytest.mark.parametrize("axis", ["tp", "pp", "sp", "ep"])
def test_spares_of_two_groups_are_a_group(axis: str, tmp_path: Path) -> None:
    """Without anybody new: both had the same part, and one takes the other part, of which it had no values."""
    sizes = race(axis, "zero2", DiesAt({1: 60, 3: 130}), tmp_path, mesh={"dp": 3, axis: 2})
    assert sizes.keys() == {0, 2, 4, 5}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("six ranks")
@pytest.mark.parametrize("axis", ["tp", "pp", "sp", "ep"])
def test_two_groups_are_lost_at_once(axis: str, tmp_path: Path) -> None:
    sizes = race(axis, "zero3", DiesAt({0: 60, 3: 60}), tmp_path, mesh={"dp": 3, axis: 2})
    assert {4, 5} < sizes.keys()
    assert sizes[4][-1] == 4


@thorough_only("eight ranks")
@sampled
@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
@pytest.mark.parametrize("axis", ["tp", "pp", "sp", "ep"])
def test_a_mesh_with_two_data_axes(axis: str, preset: str, tmp_path: Path) -> None:
    sizes = race(axis, preset, DiesAt({3: 60}), tmp_path, mesh={"node": 2, "local": 2, axis: 2})
    assert sizes.keys() == {0, 1, 4, 5, 6, 7}
    assert sizes[0][-1] == 6


@thorough_only("eight ranks")
@pytest.mark.parametrize(
    ("axis", "task", "tensor"),
    [
        ("pp", Layers(), TENSOR),
        ("sp", Sequences(), {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}),
        ("ep", Experts(CutTransformer), TENSOR_BESIDE_EXPERTS),
    ],
    ids=["pp", "sp", "ep"],
)
def test_layers_are_split_as_well(axis: str, task: Task, tensor: dict[str, Any], tmp_path: Path) -> None:
    if isinstance(task, Experts):
        task.batches = [(tokens(step, 8),) * 2 for step in range(NUM_STEPS)]
    mesh = {"dp": 2, axis: 2, "tp": 2}
    more = {"task": task, "mesh": mesh, "settings": {"tensor": tensor}, "num_newcomers": 1, "least": 8}
    sizes = race(axis, "zero1", DiesAt({3: 90}), tmp_path, **more)
    assert sizes.keys() == {0, 1, 2, 4, 5, 6, 7, 8}
    assert {one[-1] for one in sizes.values()} == {8}


INNER = thorough_only("the gate has the same with the groups outside")


@pytest.mark.parametrize("preset", ["zero3", pytest.param("zero1", marks=INNER)])
@pytest.mark.parametrize("axis", ["pp", *(pytest.param(axis, marks=INNER) for axis in ("tp", "sp", "ep"))])
def test_the_axis_may_be_the_outer_one(axis: str, preset: str, tmp_path: Path) -> None:
    """Then whoever comes next in the order of ranks has another part of the model, and cannot read a lost image."""
    sizes = race(axis, preset, DiesAt({2: 60}), tmp_path, mesh={axis: 2, "dp": 2}, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("hosts", "as_host"), [("aabb", False), ("aabb", True), ("abab", False), ("abcd", False), ("abcd", True)]
)
@pytest.mark.parametrize("axis", AXES)
def test_groups_on_several_hosts(axis: str, hosts: str, as_host: bool, preset: str, tmp_path: Path) -> None:
    """A rank, or its host, is lost. The images of a spare may be on a host where nobody goes on. Copies are outside of
    the group, so that one is there. Where every group is on all hosts, no host may be lost."""
    fault = HostDiesAt({1: 67}, as_host=as_host)
    sizes = race(axis, preset, fault, tmp_path, hosts=hosts, loop="train_step")
    left = [rank for rank in range(4) if rank != 1 and not (as_host and hosts[rank] == hosts[1])]
    assert sizes.keys() == ({2, 3} if AXES[axis].has_groups else set(left[:2]))
    assert {one[-1] for one in sizes.values()} == {2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("axis", AXES)
def test_what_is_frozen_is_there_afterwards(axis: str, preset: str, tmp_path: Path) -> None:
    frozen = AXES[axis].frozen
    sizes = race(axis, preset, DiesAt({0: 55}), tmp_path, frozen=frozen, num_newcomers=1, least=4)
    assert sizes.keys() == {1, 2, 3, 4}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(("axis", "mesh"), [("tp", {"dp": 2, "tp": 3}), ("tp alone", {"tp": 3})])
def test_parts_of_different_sizes(axis: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Three ranks share four heads: their flat buffers differ in size, so that each is read by one with the same, or
    by one that has all."""
    num_ranks = math.prod(mesh.values())
    more = {"mesh": mesh, "num_newcomers": 1, "least": num_ranks}
    sizes = race(axis, "zero1", DiesAt({num_ranks - 2: 60}), tmp_path, **more)
    assert sizes[0][-1] == num_ranks


SETTINGS = [(name, setting) for name, axis in AXES.items() for setting in axis.settings]


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize(("axis", "setting"), SETTINGS)
def test_with_other_settings_of_a_plan(axis: str, setting: str, rank: int, tmp_path: Path) -> None:
    own = AXES[axis]
    settings = own.settings[setting]
    num_ranks = math.prod(settings.get("mesh", own.mesh).values())
    loop = "train_step" if setting == "micro-batches" else ""
    more = {"settings": settings, "loop": loop, "num_newcomers": 1, "least": num_ranks}
    sizes = race(axis, "zero1", DiesAt({rank: 75}), tmp_path, way=own.way_with(setting), **more)
    assert sizes[3 - rank][-1] == num_ranks


class CausalModel(Task):
    """Of transformers: it computes its loss itself, and splits its batch itself."""

    def __init__(self, make: Any, *, whole_outputs: bool = False) -> None:
        self.make, self._whole_outputs = make, whole_outputs

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = tokens(step, ROWS)
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        ids = tokens(step, ROWS).tensor_split(num)[place]
        engine.weigh(len(ids), ROWS)
        if self._whole_outputs:
            engine.give_whole_outputs()
        output = engine.module(input_ids=ids, labels=ids)
        assert output.logits.shape[1] * engine.plan.mesh.get("sp", 1) == ids.shape[1]
        update(loop, engine, optimizer, output.loss)
        loss: Tensor = output.loss
        return loss.detach()


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(
    ("axis", "task"),
    [
        ("tp alone", CausalModel(llama)),  # with a plan of its own, and fewer heads of keys than ranks
        ("sp", CausalModel(llama)),
        ("sp", CausalModel(llama, whole_outputs=True)),
        ("ep", CausalModel(mixtral)),
    ],
    ids=["tp alone", "sp", "sp, whole outputs", "ep"],
)
def test_a_model_of_transformers(axis: str, task: Task, tmp_path: Path) -> None:
    mesh = AXES[axis].mesh
    plan = {"preset": "zero1" if axis == "tp alone" else "zero2", "mesh": mesh}
    sizes = race_of(task, plan, DiesAt({1: 60}), tmp_path, num_newcomers=1, least=4)
    assert sizes[0][-1] == 4


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_record_has_each_step_once_though_who_writes_it_is_a_spare(tmp_path: Path) -> None:
    run, images = tmp_path / "run", tmp_path / "images"
    images.mkdir()
    models = [Transformer() for _ in range(5)]

    def work(world: World, member: int) -> tuple[int, int]:
        own = models[member]
        engine = sw.shard(own, {**AXES["tp"].plan("zero2"), "run": str(run)}, optimizer=adamw(own), world=world)
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
