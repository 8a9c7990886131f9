"""A rank is lost between a change of values by hand and the next forward, while others have come further: what it had
is from before, and is not mixed with what the others have."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import World
from shardwise.errors import FaultError, LostStateError
from tests.patience import PATIENCE
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_lost_ranks import DISKS, ROWS, TIERS, adamw, assert_same_values, batches, loss_of, net, update
from tests.ranks.threads_as_members import Killed, ThreadMembership, run_members
from tests.thorough import sampled

Tensor = torch.Tensor
NUM_RANKS, EDITED_AFTER, VICTIM = 3, 2, 1
PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"preset": "zero3"},
    "ddp": {"preset": "ddp"},
    "zero1": {"preset": "zero1"},
    "zero3-offload": TIERS["zero3-offload"],
    "disk": DISKS["infinity"],
}


def train(engine: sw.Engine, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    while engine.num_steps < num_steps:
        place, num = engine.data_ranks
        x, y = (whole.tensor_split(num)[place] for whole in batches()[engine.num_steps])
        engine.weigh(len(x), ROWS)
        update("engine", engine, optimizer, loss_of(engine(x), y))


def trained_alone(model: torch.nn.Module, edited: Tensor, num_steps: int) -> torch.nn.Module:
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    for step in range(num_steps):
        if step == EDITED_AFTER:
            with torch.no_grad():
                plain.d.weight.copy_(edited)
        x, y = batches()[step]
        loss_of(plain(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()
    return plain


@sampled
@pytest.mark.parametrize("change", ["set", "load_state_dict"])
@pytest.mark.parametrize("name", [name for name in PLANS if name != "ddp"])
def test_all_restart_where_a_rank_is_lost_while_others_set_values(name: str, change: str, tmp_path: Path) -> None:
    """They wait for it in that call, and have changed some of what they had."""
    images, plan = tmp_path / "images", PLANS[name]
    images.mkdir()
    plan = {**plan, "disk": str(tmp_path / "disk")} if name == "disk" else plan
    model = net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> bool:
        own, membership = models[member], world.membership
        assert isinstance(membership, ThreadMembership)
        engine = sw.shard(own, plan, optimizer=(optimizer := adamw(own)), world=world)
        train(engine, optimizer, EDITED_AFTER)
        state = engine.state_dict()
        if member == VICTIM:
            raise Killed
        with pytest.raises(FaultError, match="Rank 1 raised Killed"):
            engine.set("d.weight", state["d.weight"]) if change == "set" else engine.load_state_dict(state)
        return membership.has_given_up

    assert run_members(NUM_RANKS, work, images) == {0: True, 2: True}


@sampled
@pytest.mark.parametrize(("name", "has_edited"), [*((name, True) for name in PLANS), ("ddp", False)])
def test_values_from_before_are_not_mixed_with_those_set_by_hand(name: str, has_edited: bool, tmp_path: Path) -> None:
    """Where others have all that the lost rank had, they go on, whether it had set them, too: nothing is sent there."""
    images, plan = tmp_path / "images", PLANS[name]
    images.mkdir()
    plan = {**plan, "disk": str(tmp_path / "disk")} if name == "disk" else plan
    model = net()
    edited = model.d.weight.detach() + 1.0
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]
    have_edited = threading.Barrier(NUM_RANKS)

    def work(world: World, member: int) -> tuple[bool, dict[str, Tensor] | None]:
        own, membership = models[member], world.membership
        assert isinstance(membership, ThreadMembership)
        engine = sw.shard(own, plan, optimizer=(optimizer := adamw(own)), world=world)
        train(engine, optimizer, EDITED_AFTER)
        if member != VICTIM or has_edited:
            engine.set("d.weight", edited)
        have_edited.wait(PATIENCE)
        if member == VICTIM:
            raise Killed
        try:
            train(engine, optimizer, EDITED_AFTER + 2)
        except LostStateError:
            return membership.has_given_up, None
        state = engine.state_dict()
        engine.close()
        return membership.has_given_up, state

    results = run_members(NUM_RANKS, work, images)
    assert results.keys() == {0, 2}
    for has_given_up, state in results.values():
        assert has_given_up == (name != "ddp")
        if name == "ddp":
            assert state is not None
            assert_same_values(state, trained_alone(model, edited, EDITED_AFTER + 2), 2e-6)


def dies_at(place: str, victim: int, step: int) -> Callable[[str, sw.Engine, int], None]:
    def check(at: str, engine: sw.Engine, member: int) -> None:
        if (at, member, engine.num_steps) == (place, victim, step):
            raise Killed

    return check


@sampled
@pytest.mark.parametrize("place", ["forward", "backward", "read", "set", "verdict", "update", "commit"])
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_a_loop_that_sets_gradients_takes_the_step_again(name: str, place: str, tmp_path: Path) -> None:
    """A rank is lost before one of its calls, or in its step. Gradients are of one iteration: nothing that ranks go on
    from has changed. In the void iteration they are zero."""
    model = net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]
    check = dies_at(place, VICTIM, 2)
    points = {"verdict": "all_reduce of verdict", "update": "broadcast of buffers", "commit": "exchange of commit"}

    def work(world: World, member: int) -> dict[str, Tensor]:
        own = models[member]
        engine = sw.shard(own, name, optimizer=adamw(own), world=world)
        if place in points and member == VICTIM:
            DiesBefore(VICTIM, 2, points[place])(engine, member)
        while engine.num_steps < 4:
            rank, num = engine.data_ranks
            x, y = (whole.tensor_split(num)[rank] for whole in batches()[engine.num_steps])
            engine.weigh(len(x), ROWS)
            check("forward", engine, member)
            loss = loss_of(engine(x), y)
            check("backward", engine, member)
            engine.backward(loss)
            check("read", engine, member)
            grad = engine.get("d.weight", "grad")
            assert grad is not None
            check("set", engine, member)
            engine.set("d.weight", grad * 0.5, "grad")
            engine.step()
        state = engine.state_dict()
        engine.close()
        return state

    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    for x, y in batches()[:4]:
        loss_of(plain(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        assert plain.d.weight.grad is not None
        plain.d.weight.grad *= 0.5
        optimizer.step()
        optimizer.zero_grad()
    results = run_members(NUM_RANKS, work, tmp_path)
    assert results.keys() == {0, 2}
    for state in results.values():
        assert_same_values(state, plain, 2e-6)


def by_set(engine: sw.Engine) -> None:
    value = engine.get("d.weight")
    assert value is not None
    engine.set("d.weight", value * 0.9)


def by_loading(engine: sw.Engine) -> None:
    state = engine.state_dict()
    engine.load_state_dict({**state, "d.weight": state["d.weight"] * 0.9})


def by_writing(engine: sw.Engine) -> None:
    with torch.no_grad():
        engine.module.d.weight.mul_(0.9)


def by_writing_data(engine: sw.Engine) -> None:
    engine.module.d.weight.data.mul_(0.9)


def by_gathering(engine: sw.Engine) -> None:
    with engine.gathered("d.weight", write=True), torch.no_grad():
        engine.module.d.weight.mul_(0.9)


@sampled
@pytest.mark.parametrize("change", [by_set, by_loading, by_writing, by_writing_data, by_gathering])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("is_behind", [False, True])
def test_a_loop_that_changes_weights_in_each_iteration_changes_them_once(
    is_behind: bool, name: str, change: Callable[[sw.Engine], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before or behind the step, also of the iteration that is void because a rank is lost in it."""
    caplog.set_level("WARNING", "shardwise")
    images, plan, num_steps = tmp_path / "images", PLANS[name], 4
    images.mkdir()
    plan = {**plan, "disk": str(tmp_path / "disk")} if name == "disk" else plan
    model = net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> dict[str, Tensor]:
        own = models[member]
        engine = sw.shard(own, plan, optimizer=(optimizer := adamw(own)), world=world)
        while engine.num_steps < num_steps:
            step = engine.num_steps
            place, num = engine.data_ranks
            x, y = (whole.tensor_split(num)[place] for whole in batches()[step])
            if not is_behind:
                change(engine)
            engine.weigh(len(x), ROWS)
            loss = loss_of(engine(x), y)
            if (member, step) == (VICTIM, 2):
                raise Killed
            update("engine", engine, optimizer, loss)
            if is_behind:
                change(engine)
        state = engine.state_dict()
        engine.close()
        return state

    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    for x, y in batches()[:num_steps]:
        with torch.no_grad():
            plain.d.weight.mul_(1.0 if is_behind else 0.9)
        loss_of(plain(x), y).backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            plain.d.weight.mul_(0.9 if is_behind else 1.0)
    results = run_members(NUM_RANKS, work, images)
    assert results.keys() == {0, 2}
    for state in results.values():
        assert_same_values(state, plain, 2e-6)
    assert caplog.text.count("has no effect after a step that was void, since the loop takes that step again") == 1
