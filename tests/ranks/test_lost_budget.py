"""Ranks of whole replica groups are lost under a budget: each of the others holds more, and keeps to it. What is held
where no group is whole is in test_smaller_meshes.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.fit.budget import Ranks
from shardwise.optim import vet
from shardwise.parallel.outline import SmallerMeshes
from shardwise.plan import Offload, load_plan
from shardwise.plan.mesh import Mesh
from shardwise.sharded.sharding import with_fewer_groups
from tests.ranks.lost_groups import DiesBefore, Layers, Task, race_of
from tests.ranks.test_lost_ranks import DiesAt, adamw
from tests.ranks.test_smaller_meshes import Watched
from tests.thorough import sampled


@sampled
@pytest.mark.parametrize("preset", ["zero3", "zero2"])
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": -1}, None])
def test_those_that_are_left_keep_to_the_budget(preset: str, mesh: dict[str, int] | None, tmp_path: Path) -> None:
    """One dies, and another one comes: two keep more off their devices than three."""
    allowed = 160_000
    plan: dict[str, Any] = {"preset": preset, "budget": {"device": allowed}, **({"mesh": mesh} if mesh else {})}
    task = Watched(Layers())
    sizes = race_of(task, plan, DiesAt({0: 60}), tmp_path, num_ranks=3, num_newcomers=1)
    assert (sizes[2][0], sizes[2][-1]) == (3, 3)
    most = {num: max(held for _, held in seen) for num, seen in task.seen.items()}
    assert most[2] <= max(allowed, most[3])  # units that are gathered in another order than foreseen take a little more
    shares = {num: {offload.optim for offload, _ in seen} for num, seen in task.seen.items()}
    assert all(len(one) == 1 for one in shares.values()), "the one that has come keeps there what the others do"
    (three,), (two,) = shares[3], shares[2]
    assert three < two


class Replanned(Watched):
    """It gets its budget after the first step."""

    def __init__(self, task: Task, plan: dict[str, Any]) -> None:
        super().__init__(task)
        self._plan = plan

    def take_step(self, loop: str, engine: sw.Engine, *more: Any) -> torch.Tensor:
        if engine.num_steps == 1 and engine.plan.preset != self._plan["preset"]:
            engine.reshard(self._plan)
            self.seen.clear()
        return super().take_step(loop, engine, *more)


def test_a_budget_that_came_with_another_plan_is_kept_to(tmp_path: Path) -> None:
    allowed = 160_000
    task = Replanned(Layers(), {"preset": "zero2", "mesh": {"dp": 3}, "budget": {"device": allowed}})
    race_of(task, {"preset": "zero1", "mesh": {"dp": 3}}, DiesBefore(0, 3, "exchange of commit"), tmp_path)
    assert all(held <= allowed for _, held in task.seen[2])
    (three,), (two,) = ({offload.optim for offload, _ in task.seen[num]} for num in (3, 2))
    assert three < two


def test_a_job_waits_for_as_many_as_the_budget_needs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What two ranks would have to keep on the host has no room there."""
    task = Watched(Layers())
    plan: dict[str, Any] = {"preset": "zero3", "mesh": {"dp": 3}, "budget": {"device": 160_000, "host": 1000}}
    sizes = race_of(task, plan, DiesAt({0: 60}), tmp_path, num_newcomers=1)
    assert {size for seen in sizes.values() for size in seen} == {3}
    assert {offload for offload, _ in task.seen[3]} == {Offload()}
    (said,) = [one.message for one in caplog.records if "there is no room" in one.message]
    assert said.startswith("With fewer than 3 of 3 ranks there is no room: To fit 156.2 KiB on each device, 2 ranks ")
    assert said.endswith("The job then waits for others, as with fewer than MIN of --elastic, or ends.")


def test_what_has_no_room_after_a_loss_is_said_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    """Without a budget: parameters, gradients and two states, and of all but gradients an image."""
    model = Layers().make()
    updates, num_bytes = vet([adamw(model)], model), 4 * sum(param.numel() for param in model.parameters())
    world: Any = SimpleNamespace(rank=0, membership=SimpleNamespace(least=2))
    plan, mesh, smaller = load_plan({"preset": "ddp", "mesh": {"dp": 4}}), Mesh.of({"dp": 4}, 4), SmallerMeshes()
    for room, num_said in ((15 * num_bytes, 0), (13 * num_bytes, 1)):
        ranks = Ranks(on_cpu=True, num_local=2, host_bytes=room)
        assert with_fewer_groups(smaller, model, plan, mesh, ranks, updates, world) == smaller
        said = [one.message for one in caplog.records if "there is no room" in one.message]
        assert len(said) == num_said
    assert "2 of these ranks would hold" in said[0]
    assert "The system may then end ranks for lack of memory." in said[0]
