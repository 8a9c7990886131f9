"""Buffers of pipeline stages (running statistics, biases of routers) where ranks are lost and others get their stages:
losses, parameters and buffers are those of the unsharded model. In test_lost_groups.py these tasks are ways of `pp
alone`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.elastic.stage_buffers import RanksBuffers, StageBuffers
from shardwise.elastic.state_image import ImagePlace
from shardwise.elastic.survival import Survival
from tests import inside
from tests.ranks.lost_groups import PRESETS, WITH_BUFFERS, DiesBefore, Experts, race
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt
from tests.thorough import sampled, thorough_only

SCHEDULES = ("1f1b", "interleaved", "zb-h1")
POINTS = {
    "a forward": "message of activation 1",
    "a backward": "message of gradient 0",
    "the commit": "exchange of commit",
    # The biases of routers have moved, and the next iteration has not begun.
    "between steps": "gather of weighed mean",
}


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_stages_move_with_their_buffers(
    name: str, rank: int, point: str, schedule: str, preset: str, tmp_path: Path
) -> None:
    """To one of two that are left of the others, or to a new one and a spare."""
    fault = DiesBefore(rank, 2, POINTS[point])
    sizes = race("pp alone", preset, fault, tmp_path, way=f"{name}, {schedule}", num_newcomers=rank - 1)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4 if rank == 2 else 2}


@thorough_only("a second loss; test_smaller_meshes.py has one without buffers")
@sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("second", ["exchange of commit", "exchange of buffers of stages", "exchange of recovery"])
@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_another_rank_is_lost_on_the_smaller_mesh_or_while_it_is_laid(
    name: str, second: str, schedule: str, tmp_path: Path
) -> None:
    first = DiesBefore(3, 2, "message of activation 1")
    next_one = DiesBefore(0, 3 if second == "exchange of commit" else 0, second)

    def plant(engine: object, member: int) -> None:
        if member in (0, 3):
            (first if member else next_one)(engine, member)  # type: ignore[arg-type]

    sizes = race("pp alone", "zero1", plant, tmp_path, way=f"{name}, {schedule}", most_wrong=2)
    assert first.is_dead
    assert next_one.is_dead
    assert {one[-1] for one in sizes.values()} <= {1, 2}


@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("at", [60, 67, 90])
@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_a_host_is_lost_with_the_images_of_its_stages(name: str, at: int, preset: str, tmp_path: Path) -> None:
    """Buffers are in the copies on the other host: those of the step before, if the last one was not there yet."""
    sizes = race("pp alone", preset, HostDiesAt({2: at}), tmp_path, way=f"{name}, 1f1b", hosts="aabb", most_wrong=2)
    assert sizes.keys() == {0, 1}


@thorough_only("test_stages_move_with_their_buffers has it for one group")
@sampled
@pytest.mark.parametrize("preset", PRESETS[1:])
def test_the_rest_of_two_groups_takes_a_stage(preset: str, tmp_path: Path) -> None:
    """Both groups have lost the same stage. (Statistics would be those of other micro-batches than in one group.)"""
    more: Any = {"way": "biases, 1f1b", "mesh": {"dp": 2, "pp": 2}, "most_wrong": 2}
    sizes = race("pp alone", preset, DiesAt({0: 60, 2: 110}), tmp_path, **more)
    assert {one[-1] for one in sizes.values()} <= {1, 2}


@thorough_only("test_stages_move_with_their_buffers has biases that move in each step")
def test_biases_that_move_after_two_steps_move_with_what_was_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rank is lost between the two steps. Rehearsals copy no buffers of other stages."""
    task = Experts(WITH_BUFFERS["biases"](4).make, every=2)
    sizes = race("pp alone", "zero1", DiesBefore(1, 3, "gather of weighed mean"), tmp_path, task=task)
    assert {one[-1] for one in sizes.values()} == {2}
    assert not [record for record in caplog.records if record.name.startswith("torch")]


def test_an_image_has_buffers_as_of_a_step_and_as_of_the_next_iteration(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)

    def read(step: int) -> tuple[bool, list[float]]:
        found = RanksBuffers.read(0, survival.image, step)
        return found.is_committed_only, found.values["1.running_mean"].unique().tolist()

    def set_mean(value: float, size: int = 4) -> None:
        norm.running_mean = torch.full((size,), value)

    with sw.shard(model, "zero1", optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as engine:
        buffers = StageBuffers(model, None)
        survival = Survival(
            inside.flats(engine), inside.adopted(engine), ImagePlace(tmp_path, "rank0"), buffers=buffers
        )
        survival.begin(1)
        assert read(1) == (True, [0.0])
        set_mean(1.0)
        survival.iteration_begins(1)
        assert read(1) == (False, [1.0]), "nothing was to be copied any more, but these"
        set_mean(2.0)
        survival.before_change()
        survival.complete(2)
        survival.follow(2)
        survival.await_copies()
        assert (survival.image.live_version, survival.image.shadow_version) == (2, 1)
        assert read(1) == (False, [1.0]), "the copy begins with the next iteration"
        set_mean(3.0)
        survival.iteration_begins(2)
        survival.await_copies()
        assert survival.image.shadow_version == 2
        assert read(2) == (False, [3.0])
        survival.before_change()
        set_mean(4.0)
        survival.complete(3)
        set_mean(5.0, size=6)
        survival.follow(3)
        survival.iteration_begins(3)
        survival.await_copies()
        assert read(3) == (False, [5.0])
        assert len(survival.images) == len(list(tmp_path.iterdir())) == 1
        survival.close()
        set_mean(0.0)
