"""The ranks of the only replica group share the work along two axes, or three, and some of them are lost. The others
form a smaller mesh, along either axis or both, and the first one again when others have come. Losses and parameters are
those of the unsharded model. test_smaller_meshes.py has one axis."""

from __future__ import annotations

import math
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.elastic import mesh_choice
from shardwise.elastic.state_image import TORN
from shardwise.elastic.survival import Survival
from shardwise.fit.hardware import hardware
from shardwise.fit.smaller_meshes import PlainModel
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan.replica_groups import mesh_of
from tests import inside
from tests.covering import covering
from tests.patience import PATIENCE
from tests.ranks.lost_groups import (
    IN_GROUPS_OF_FOUR,
    PAIRS,
    PRESETS,
    STAGES_OF_EXPERTS,
    TENSOR,
    Deep,
    DiesBefore,
    Layers,
    race,
    race_of,
    race_while_saving,
)
from tests.ranks.test_lost_ranks import DiesAt
from tests.ranks.test_lost_ranks_table import AT, VICTIM, DiesCopying
from tests.ranks.threads_as_members import ThreadMembership
from tests.thorough import drawn, sampled, soak, thorough_only

Tensor = torch.Tensor
WAYS = [(name, way) for name, pair in PAIRS.items() for way in pair.ways]


def points() -> list[tuple[str, str, str, str, str, int]]:
    """Every way with every preset, loop, rank and point, two at a time."""
    values = {"way": WAYS, "point": list(IN_GROUPS_OF_FOUR), "preset": PRESETS, "rank": range(4)}
    found = []
    for number, case in enumerate(covering(values, strength=2)):
        (pair, way), loops = case["way"], PAIRS[case["way"][0]].loops
        found.append((pair, way, loops[number % len(loops)], case["point"], case["preset"], case["rank"]))
    return found


@sampled
@pytest.mark.parametrize(("pair", "way", "loop", "point", "preset", "rank"), points())
def test_a_rank_dies_before(pair: str, way: str, loop: str, point: str, preset: str, rank: int, tmp_path: Path) -> None:
    """Two of the others go on. Instead of every other one a new one comes, and all have the first mesh again."""
    fault = DiesBefore(rank, 2, *PAIRS[pair].points[point])
    sizes = race(pair, preset, fault, tmp_path, way=way, loop=loop, num_newcomers=rank % 2)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4 if rank % 2 else 2}


@thorough_only("moments like those of test_a_rank_dies_before")
@sampled
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("nth", [1, 3])
def test_a_rank_dies_in_the_first_forward_of_a_stage(nth: int, rank: int, tmp_path: Path) -> None:
    """There its views are compared with the unsplit model's, which shows what is wrong with shapes. A lost rank is not
    taken for such a fault."""
    fault = DiesBefore(rank, 0, "all_reduce of activations", nth)
    sizes = race("pp tp", "zero1", fault, tmp_path)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {2}


class Seeing(Layers):
    """It notes on which meshes steps are taken, which is where who decides on members takes them to be."""

    def __init__(self) -> None:
        super().__init__(partial(Deep, 4))
        self.seen: set[str] = set()

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        loss = super().take_step(loop, engine, optimizer, step, place, num)
        mesh, membership = inside.sharded(engine).mesh, engine.world.membership
        self.seen.add(str(mesh))
        assert isinstance(membership, ThreadMembership)
        assert mesh_of(membership.crowd.axes, membership.crowd.smaller, mesh.world_size) == mesh
        return loss


@thorough_only("test_smaller_meshes.py has the choice, for one axis")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize(
    ("rank", "step", "point", "mesh"),
    [
        (0, 1, "exchange of smaller meshes", "pp=1 x tp=2"),  # nobody else has heard of the choice
        (3, 1, "exchange of smaller meshes", "pp=2 x tp=1"),
        (0, 0, "message of gradient 0", "pp=1 x tp=2"),
        (3, 0, "broadcast of loss", "pp=2 x tp=1"),
        *((rank, step, "exchange of commit", "pp=2 x tp=1") for rank in (0, 3) for step in (1, 2)),
    ],
)
def test_of_meshes_of_as_many_ranks_the_fastest_is_taken(
    rank: int, step: int, point: str, mesh: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rank that has chosen is the one that is lost."""

    def seconds(*given: Any, **_: Any) -> list[float]:
        (smaller,) = (one for one in given if isinstance(one, SmallerMeshes))
        return [3.0 - one["pp"] for one in smaller.every[1:]]

    monkeypatch.setattr(mesh_choice, "described_hardware", lambda _: hardware("cpu"))
    monkeypatch.setattr(PlainModel, "seconds", seconds)
    task, fault = Seeing(), DiesBefore(rank, step, point)
    sizes = race("pp tp", preset, fault, tmp_path, task=task)
    assert fault.is_dead
    assert task.seen - {"pp=2 x tp=2"} == {mesh}
    assert {one[-1] for one in sizes.values()} == {2}


@thorough_only("test_smaller_meshes.py has it for one axis")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("pair", PAIRS)
def test_a_rank_dies_while_its_state_is_copied(
    pair: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has its parameters after that step, and the others may have no copy of the step before any more."""
    dies = DiesCopying(monkeypatch)
    sizes = race(pair, preset, dies, tmp_path)
    assert dies.died
    assert {one[-1] for one in sizes.values()} == {2}


class DiesInVerdict(DiesBefore):
    """A rank dies between the two sums of the verdict, when its partner along the first axis goes on to update. The
    copy of the step before takes as long as the rank does not wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(VICTIM, AT, "all_reduce of verdict", 2)
        self._may_end, self._has_updated = threading.Event(), threading.Event()
        copied, waited, completed, followed = Survival._copy, Survival.await_copies, Survival.complete, Survival.follow

        def is_of_victim(survival: Survival) -> bool:
            return f"rank{VICTIM}" in survival.place.name

        def copies(survival: Survival, version: int) -> None:
            if version == AT and is_of_victim(survival):
                survival.image.shadow_version = TORN
                assert self._may_end.wait(PATIENCE)
                if self.is_dead:
                    return
            copied(survival, version)

        def follows(survival: Survival, version: int) -> None:
            if version == AT and is_of_victim(survival):
                self._may_end.clear()
            followed(survival, version)

        def waits(survival: Survival) -> None:
            if is_of_victim(survival):
                self._may_end.set()
            waited(survival)

        def completes(survival: Survival, version: int, *sums: Any) -> None:
            completed(survival, version, *sums)
            if version == AT + 1:
                self._has_updated.set()

        for name, patched in (("_copy", copies), ("follow", follows), ("await_copies", waits), ("complete", completes)):
            monkeypatch.setattr(Survival, name, patched)

    def _die(self) -> None:
        try:
            super()._die()
        finally:
            if self.is_dead:
                assert self._has_updated.wait(PATIENCE)
                self._may_end.set()


@thorough_only("a moment of test_a_rank_dies_while_its_state_is_copied")
def test_a_rank_whose_state_is_being_copied_gives_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some would have updated with it, and have no parameters of the step before any more, to which all return."""
    dies = DiesInVerdict(monkeypatch)
    race("sp tp", "ddp", dies, tmp_path)
    assert dies.is_dead


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(
    ("pair", "setting"), [(name, setting) for name, pair in PAIRS.items() for setting in pair.settings]
)
def test_with_other_settings_of_a_plan(pair: str, setting: str, tmp_path: Path) -> None:
    loop = "train_step" if setting == "micro-batches" else ""
    own = PAIRS[pair]
    more: Any = {"settings": own.settings[setting], "loop": loop, "num_newcomers": 1}
    sizes = race(pair, "zero1", DiesBefore(1, 2, "exchange of commit"), tmp_path, way=own.way_with(setting), **more)
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_frozen_is_there_afterwards(pair: str, preset: str, tmp_path: Path) -> None:
    fault = DiesBefore(0, 2, "exchange of commit")
    sizes = race(pair, preset, fault, tmp_path, frozen=PAIRS[pair].frozen, num_newcomers=1)
    assert sizes.keys() == {1, 2, 3, 4}


@thorough_only("a second loss; the tests beside it have one")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("second", ["exchange of commit", "exchange of images", "exchange of recovery"])
@pytest.mark.parametrize("pair", PAIRS)
def test_one_is_left_of_four(pair: str, second: str, preset: str, tmp_path: Path) -> None:
    """Another one dies on the smaller mesh, or while it is laid."""
    first = DiesBefore(3, 2, "exchange of commit")
    next_one = DiesBefore(0, 3 if second == "exchange of commit" else 0, second)

    def plant(engine: sw.Engine, member: int) -> None:
        if member == 3:
            first(engine, member)
        elif member == 0:  # who goes on, whichever two do
            next_one(engine, member)

    sizes = race(pair, preset, plant, tmp_path, most_wrong=2)
    assert first.is_dead
    assert next_one.is_dead
    assert {one[-1] for one in sizes.values()} <= {1, 2}


@thorough_only("test_lost_ranks_saves.py has it without a smaller mesh")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("pair", PAIRS)
def test_a_rank_dies_while_a_checkpoint_is_written(pair: str, rank: int, preset: str, tmp_path: Path) -> None:
    """The others write it again, from another mesh."""
    assert len(race_while_saving(PAIRS[pair], preset, lambda member: member == rank, tmp_path)) == 2


def _ranks_die(pair: str, way: str, folder: Path, draw: random.Random) -> None:
    """At any collective, also of a recovery: one, perhaps with another in its place, or two. All that have some part of
    the model may be lost at once only where no two have the same, so that all of it is in their images at any time."""
    own = PAIRS[pair]
    at = draw.randrange(3, own.num_calls)
    later = draw.randrange(3, own.num_calls) if pair == "pp tp" else at + draw.randrange(40, own.num_calls)
    deaths = dict(zip(draw.sample(range(4), draw.randint(1, 2)), (at, later), strict=False))
    is_replaced = len(deaths) == 1 and draw.random() < 0.5  # one that is lost while others join ends them
    folder.mkdir()
    race(
        pair,
        draw.choice(PRESETS),
        DiesAt(deaths),
        folder,
        way=way,
        mesh=draw.choice([own.mesh, dict(reversed(own.mesh.items()))]),
        loop=draw.choice(own.loops),
        shares_memory=draw.random() < 0.6,
        num_newcomers=int(is_replaced),
        most_wrong=len(deaths),
    )


@thorough_only("drawn moments; test_a_rank_dies_before has fixed ones")
@sampled
@pytest.mark.parametrize(("pair", "way"), WAYS)
def test_a_rank_dies_anywhere(pair: str, way: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 8)):
        _ranks_die(pair, way, tmp_path / str(seed), random.Random(f"{pair} {way} {seed}"))


@soak("draws hundreds of moments at which ranks die, and takes minutes")
@pytest.mark.parametrize(("pair", "way"), WAYS)
def test_ranks_die_anywhere(pair: str, way: str, tmp_path: Path) -> None:
    for _ in range(30):
        seed = random.SystemRandom().randrange(10**9)
        print(f"seed {seed}")  # pytest shows it where this fails
        _ranks_die(pair, way, tmp_path / str(seed), random.Random(seed))


@thorough_only("eight ranks")
@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("axes", [("pp", "dp", "tp"), ("pp", "dp", "ep"), ("dp", "pp", "tp"), ("pp", "tp", "ep")])
def test_three_axes(axes: tuple[str, ...], preset: str, tmp_path: Path) -> None:
    """With groups, one leaves and then the other has lost a rank too: the rest of both are one."""
    mesh = dict.fromkeys(axes, 2)
    task = STAGES_OF_EXPERTS() if "ep" in axes else Layers()
    plan = {"preset": preset, "mesh": mesh, "accumulate": 2}
    if "tp" in axes:
        plan["tensor"] = {"plan": {"head": "column_gathered"}} if "ep" in axes else TENSOR
    deaths = [DiesBefore(0, 2, "exchange of commit"), DiesBefore(2, 3, "exchange of commit")]

    def plant(engine: sw.Engine, member: int) -> None:
        if member in (0, 7):
            deaths[member == 7](engine, member)

    sizes = race_of(task, plan, plant, tmp_path, loop="train_step", most_wrong=2)
    assert deaths[0].is_dead
    assert math.prod(mesh.values()) not in {one[-1] for one in sizes.values()}
