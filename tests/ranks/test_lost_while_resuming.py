"""A rank is lost while all read a checkpoint, or look for one: the others read it again, and train on from there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import PostOffice, ThreadTransport, World
from shardwise.testing import plant
from tests.ranks.lost_groups import AXES, BOUND, NUM_STEPS, DiesBefore, Layers, trained_alone
from tests.ranks.test_lost_ranks import adamw, assert_same_values
from tests.ranks.threads_as_members import Killed, ThreadMembership, is_collective, run_members
from tests.thorough import sampled

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"preset": "zero3"},
    "groups": AXES["tp"].plan("zero1"),
    "one group": AXES["tp alone"].plan("zero2", mesh={"tp": 4}),
    "stages": AXES["pp"].plan("zero1"),
}
SAVED_AFTER = 2


class DiesInside:
    """A member dies before its n-th collective while `is_inside`."""

    def __init__(self, nth: int) -> None:
        self.is_inside, self.is_dead = False, False
        self._left = nth

    def watch(self, engine: sw.Engine) -> None:
        def counted(_: int, __: int, what: str) -> bool:
            self._left -= self.is_inside and is_collective(what)
            if not self._left:
                self.is_dead = True
                raise Killed
            return False

        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)
        membership.plant(lambda world: plant(counted, world))


def replicas(number: int) -> tuple[list[torch.nn.Module], torch.nn.Module]:
    """So many of one model, and what it is after all steps."""
    torch.manual_seed(3)
    model = Layers().make()
    _, plain = trained_alone(Layers(), model)
    return [copy.deepcopy(model) for _ in range(number)], plain


def saved(model: torch.nn.Module, folder: Path) -> None:
    world = World(0, 1, ThreadTransport(PostOffice(), 0))
    with sw.shard(model, "ddp", optimizer=(optimizer := adamw(model)), world=world) as engine:
        while engine.num_steps < SAVED_AFTER:
            Layers().take_step("engine", engine, optimizer, engine.num_steps, 0, 1)
        engine.save(folder, state={"mine": 5})


def trained_on(engine: sw.Engine, optimizer: torch.optim.Optimizer, loop: str) -> dict[str, Any]:
    """What the model has after the steps that are left."""
    while engine.num_steps < NUM_STEPS:
        Layers().take_step(loop, engine, optimizer, engine.num_steps, *engine.data_ranks)
    state = engine.state_dict()
    engine.close()
    return state


@sampled
@pytest.mark.parametrize("nth", [1, 2, 4, 8, 12])
@pytest.mark.parametrize("name", PLANS)
def test_the_others_read_the_checkpoint_again(name: str, nth: int, tmp_path: Path) -> None:
    images, folder = tmp_path / "images", tmp_path / "checkpoints"
    images.mkdir()
    models, plain = replicas(6)
    saved(models.pop(), folder)
    dies = DiesInside(nth)
    found: dict[int, Any] = {}

    def work(world: World, member: int) -> dict[str, Any]:
        mine = models[member]
        optimizer = adamw(mine)
        engine = sw.shard(mine, PLANS[name], optimizer=optimizer, world=world)
        if member == 1:
            dies.watch(engine)
            dies.is_inside = True
        loaded = engine.resume(folder)
        dies.is_inside = dies.is_inside and member != 1
        found[member] = None if loaded is None else (loaded.step, loaded.state.get("mine"))
        return trained_on(engine, optimizer, "train_step" if name == "stages" else "engine")

    results = run_members(4, work, images, num_newcomers=1)
    assert dies.is_dead or nth > 8
    assert len(results) >= 3 - dies.is_dead
    for state in results.values():
        assert_same_values(state, plain, BOUND)
    assert all(found[member] == (SAVED_AFTER, 5) for member in results if member < 4), found


def test_the_others_begin_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    """They have looked for one together when a rank was lost."""
    dies = DiesInside(1)
    models, plain = replicas(3)

    def work(world: World, member: int) -> dict[str, Any]:
        mine = models[member]
        optimizer = adamw(mine)
        engine = sw.shard(mine, "zero1", optimizer=optimizer, world=world)
        if member == 1:
            dies.watch(engine)
            dies.is_inside = True
        assert engine.resume(tmp_path / "none") is None
        return trained_on(engine, optimizer, "plain")

    (tmp_path / "images").mkdir()
    results = run_members(3, work, tmp_path / "images")
    assert results.keys() == {0, 2}
    for state in results.values():
        assert_same_values(state, plain, BOUND)


@sampled
@pytest.mark.parametrize(("point", "num_taken"), [("exchange of commit", 1), ("agree * verdict *", 0)])
@pytest.mark.parametrize("name", PLANS)
def test_the_first_step_after_a_checkpoint_is_repeated_with_its_states(
    name: str, point: str, num_taken: int, tmp_path: Path
) -> None:
    """The optimizer has had none before. A new rank gets them, too."""
    images, folder = tmp_path / "images", tmp_path / "checkpoints"
    images.mkdir()
    models, plain = replicas(6)
    saved(models.pop(), folder)
    dies = DiesBefore(1, num_taken, point)

    def work(world: World, member: int) -> dict[str, Any]:
        mine = models[member]
        optimizer = adamw(mine)
        engine = sw.shard(mine, PLANS[name], optimizer=optimizer, world=world)
        engine.resume(folder)
        dies(engine, member)
        return trained_on(engine, optimizer, "train_step" if name == "stages" else "engine")

    results = run_members(4, work, images, num_newcomers=1)
    assert dies.is_dead
    for state in results.values():
        assert_same_values(state, plain, BOUND)
