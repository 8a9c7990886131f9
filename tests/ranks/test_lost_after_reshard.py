"""Ranks are lost, and join, in a job whose loop has changed its plan since it began: what the others do then follows
from the plan that they have by now."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import tokens

import shardwise as sw
from shardwise.sharded import fitting
from tests import inside
from tests.ranks.lost_groups import AXES, DiesBefore, Experts, Layers, Task, race_of
from tests.ranks.test_smaller_meshes import Watched
from tests.thorough import sampled, soak, thorough_only

COMMIT = "exchange of commit"


class Changing(Watched):
    """Its loop changes the plan before a step, and does so again before it is repeated, as it knows of steps alone."""

    def __init__(self, task: Task, at: int, plan: Mapping[str, Any]) -> None:
        super().__init__(task)
        self._at, self._plan = at, dict(plan)
        self.plans: dict[int, set[str]] = {}
        """What plans and meshes there were afterwards, by the number of ranks."""

    def take_step(self, loop: str, engine: sw.Engine, *more: Any) -> torch.Tensor:
        if engine.num_steps == self._at:
            engine.reshard({**engine.plan.model_dump(exclude_unset=True), **self._plan})
        loss = super().take_step(loop, engine, *more)
        if engine.num_steps > self._at:
            self.plans.setdefault(engine.world.size, set()).add(f"{engine.plan.preset} on {engine.mesh}")
        return loss


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another preset": ({"preset": "ddp"}, {"preset": "zero3", "units": {"min_numel": 3000}}),
    "offload": ({"preset": "zero2"}, {"preset": "zero1", "offload": {"optim": 0.5}}),
    "another mesh": ({"preset": "zero1", "mesh": {"dp": 3}}, {"preset": "hsdp", "mesh": {"node": 3, "local": 1}}),
    "a budget": ({"preset": "zero2"}, {"preset": "zero2", "budget": {"device": 160_000}}),
}


@sampled
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_that_joins_takes_the_plan_that_the_others_have_by_now(change: str, tmp_path: Path) -> None:
    before, after = CHANGES[change]
    task = Changing(Layers(), 1, after)
    sizes = race_of(task, before, DiesBefore(0, 3, COMMIT), tmp_path, num_ranks=3, num_newcomers=1)
    assert sizes[3][-1] == 3
    assert all(len(plans) == 1 for plans in task.plans.values()), task.plans
    assert {plan.partition(" ")[0] for plans in task.plans.values() for plan in plans} == {after["preset"]}


class Unfreezing(Layers):
    """What is frozen at first is trained from step 4 on."""

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        if step >= 4:
            model.requires_grad_(True)
        return super().loss(model, step)

    def take_step(self, loop: str, engine: sw.Engine, optimizer: Any, step: int, *more: Any) -> torch.Tensor:
        if step >= 4:
            engine.module.requires_grad_(True)
        return super().take_step(loop, engine, optimizer, step, *more)


def test_a_rank_that_joins_keeps_to_the_budget_when_the_others_plan_memory_again(tmp_path: Path) -> None:
    """What is unfrozen later gets its memory then, on all ranks by the same plan."""
    plan = {"preset": "zero2", "budget": {"device": 160_000}}
    dies = DiesBefore(0, 1, COMMIT)
    sizes = race_of(Unfreezing(), plan, dies, tmp_path, num_ranks=3, num_newcomers=1, frozen=("blocks.0.*",))
    assert sizes[3][-1] == 3


@sampled
@pytest.mark.parametrize("name", ["tp", "sp", "ep", "tp alone", "sp alone", "ep alone"])
def test_groups_leave_or_shrink_under_the_names_of_the_new_mesh(name: str, tmp_path: Path) -> None:
    """Of two groups one leaves, and one alone goes on with two ranks of four."""
    own, axis = AXES[name], name.partition(" ")[0]
    before = {"dp": 2, axis: 2} if own.has_groups else {axis: 4}
    after = {"node": 1, "local": before.get("dp", 1), axis: before[axis]}
    task = Changing(own.ways[own.usual][0](), 1, {"preset": "hsdp", "mesh": after})
    sizes = race_of(task, own.plan("zero1", mesh=before), DiesBefore(0, 3, COMMIT), tmp_path, loop=own.loops[0])
    assert {one[-1] for one in sizes.values()} == {2}
    assert task.plans[2] == {f"hsdp on node=1 x local=1 x {axis}=2"}


@thorough_only("the test above changes the plan before the loss")
@sampled
@pytest.mark.parametrize(
    "change", [{"preset": "zero3", "mesh": {"tp": 4}}, {"clip_grad_norm": 1e9}], ids=["as a whole", "as it is here"]
)
def test_a_plan_that_is_changed_on_a_smaller_mesh_is_that_of_the_whole_job(
    change: dict[str, Any], tmp_path: Path
) -> None:
    """Two ranks are left of four when it is changed, and the first mesh comes back with others."""
    own = AXES["tp alone"]
    task = Changing(own.ways[own.usual][0](), 1, change)
    plan = own.plan("zero1", mesh={"tp": 4})
    sizes = race_of(task, plan, DiesBefore(1, 1, COMMIT), tmp_path, num_newcomers=1)
    assert {one[-1] for one in sizes.values()} == {4}


def test_fewer_data_ranks_change_to_a_plan_whose_mesh_has_all(tmp_path: Path) -> None:
    task = Changing(Layers(), 3, {"preset": "hsdp", "mesh": {"node": 2, "local": 2}})
    race_of(task, {"preset": "zero1", "mesh": {"dp": 4}}, DiesBefore(1, 1, COMMIT), tmp_path)
    assert task.plans == {3: {"hsdp on node=1 x local=3"}}


@thorough_only("so has a rank that joins, in the first test")
def test_a_spare_that_comes_back_has_the_plan_that_the_others_have_by_now(tmp_path: Path) -> None:
    """They have changed it while it waited. Later the group leaves that it did not wait for."""
    own = AXES["tp"]

    class ChangingWithTwo(Layers):
        def take_step(self, loop: str, engine: sw.Engine, *more: Any) -> torch.Tensor:
            if engine.num_steps == 1 and engine.world.size == 2:
                engine.reshard(own.plan("zero3"))
            return super().take_step(loop, engine, *more)

    faults = {0: DiesBefore(0, 1, COMMIT), 2: DiesBefore(0, 4, COMMIT)}
    engines: dict[int, sw.Engine] = {}

    def plant(engine: sw.Engine, member: int) -> None:
        engines[member] = engine
        if member in faults:
            faults[member](engine, member)

    sizes = race_of(ChangingWithTwo(), own.plan("zero1"), plant, tmp_path, num_newcomers=1)
    assert all(fault.is_dead for fault in faults.values())
    assert {member: engines[member].plan.preset for member in sizes} == {1: "zero3", 4: "zero3"}
    assert {one[-1] for one in sizes.values()} == {2}


@sampled
@pytest.mark.parametrize("there", [True, False], ids=["there are", "there are no more"])
def test_which_ranks_leave_together_follows_from_the_mesh(there: bool, tmp_path: Path) -> None:
    """Experts are dealt out, or no more, since the job has begun."""
    meshes = {"dp": 4}, {"dp": 2, "ep": 2}
    before, after = meshes if there else meshes[::-1]
    task = Changing(Experts(), 1, {"mesh": after})
    sizes = race_of(task, {"preset": "zero1", "mesh": before}, DiesBefore(1, 3, COMMIT), tmp_path)
    assert {one[-1] for one in sizes.values()} == {2 if there else 3}


@thorough_only("a budget, stages and a lost rank; pairs of them have tests of their own")
def test_activations_that_were_fitted_in_a_pipeline_stay_so_when_a_rank_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "POLICIES", ("recompute",))
    seen: set[tuple[int, str | None, bool]] = set()

    class Fitting(Layers):
        def take_step(self, loop: str, engine: sw.Engine, *more: Any) -> torch.Tensor:
            if engine.num_steps == 0:
                said = engine.fit_activations(tokens(0, 1), "1GiB")
                assert "recompute" in said
            loss = super().take_step(loop, engine, *more)
            treated = inside.sharding(engine).treatments.have("recompute")
            seen.add((engine.world.size, engine.plan.activations.policy, treated))
            return loss

    dies = DiesBefore(1, 3, COMMIT)
    race_of(Fitting(), AXES["pp"].plan("zero1"), dies, tmp_path, loop="train_step")
    assert seen == {(4, "recompute", True), (2, "recompute", True)}


DRAWN: list[dict[str, Any]] = [
    {"preset": "ddp", "mesh": {"dp": 4}},
    {"preset": "zero1", "mesh": {"dp": -1}},
    {"preset": "zero2", "mesh": {"dp": 4}, "units": {"min_numel": 3000}},
    {"preset": "zero3", "mesh": {"dp": 4}},
    {"preset": "zero3", "mesh": {"dp": 2, "ep": 2}},
    {"preset": "zero1", "mesh": {"dp": 2, "ep": 2}},
    {"preset": "hsdp", "mesh": {"node": 2, "local": 2}},
    {"preset": "hpz", "mesh": {"node": 2, "local": 1, "ep": 2}},
    {"preset": "offload", "mesh": {"dp": 4}},
    {"preset": "zero2", "mesh": {"ep": 4}},
]


@soak("draws plans and moments at which ranks die, and takes minutes")
def test_plans_change_and_ranks_die(tmp_path: Path) -> None:
    for _ in range(60):
        seed = random.SystemRandom().randrange(10**9)
        print(f"seed {seed}")  # pytest shows it where this fails
        draw, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        before, after = draw.sample(DRAWN, 2)
        at = draw.randrange(1, 4)
        point = draw.choice([COMMIT, "*reduce*", "agree * verdict *", "gather of weighed mean"])
        before_it = [] if "ep" in after["mesh"] else [at - 1]  # three ranks form no groups
        dies = DiesBefore(draw.randrange(4), draw.choice([*before_it, at + 1, 5]), point)
        task, num_newcomers = Changing(Experts(), at, after), draw.randrange(2)
        loop, shares_memory = draw.choice(["engine", "train_step"]), draw.random() < 0.6
        more: Any = {"num_newcomers": num_newcomers, "shares_memory": shares_memory, "most_wrong": 2}
        race_of(task, before, dies, folder, loop=loop, num_ranks=4, **more)
