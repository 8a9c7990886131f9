"""Ranks of an elastic job compute each other's micro-batches again (`verify: {gradients}`): one is lost meanwhile, or
one computes wrong results, and leaves. Losses and parameters are those of the plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic.recovery import Recovery
from shardwise.elastic.regroup_reports import Report
from shardwise.errors import CorruptionError, LostStateError, StateError
from shardwise.testing import plant
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_lost_ranks import (
    NUM_STEPS,
    PLANS,
    DiesAt,
    Net,
    adamw,
    batches,
    flip_a_bit,
    killed_when_left_out,
    loss_of,
    race,
)
from tests.ranks.threads_as_members import Killed, ThreadMembership, run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
VERIFIED = {"gradients": 1}
NAMES = ("ddp", "zero1", "zero3")


POINTS = [
    ("exchange of batches", 1),  # how long the batches are
    ("all_to_all of batches", 1),
    ("exchange of batches", 2),  # what both have found
]


@sampled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_before(point: tuple[str, int], victim: int, name: str, tmp_path: Path) -> None:
    fault = DiesBefore(victim, 2, *point)
    found = race({**PLANS[name], "verify": VERIFIED}, fault, tmp_path, loop="train_step")
    assert fault.is_dead
    assert found.keys() == {0, 1, 2, 3} - {victim}
    assert set(found.values()) == {1}


@thorough_only("test_a_rank_dies_before has fixed points")
@sampled
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("nth", range(30, 60))
def test_a_rank_dies_anywhere(nth: int, victim: int, name: str, tmp_path: Path) -> None:
    """At any of the communications of two steps, those of the passes that are computed again included."""
    found = race({**PLANS[name], "verify": VERIFIED}, DiesAt({victim: nth}), tmp_path, loop="train_step")
    assert len(found) == 3


@sampled
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_computes_wrong_gradients_leaves(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only it had at rest comes from its image: nothing tells that this is wrong, and no step is lost."""
    wrong = killed_when_left_out(monkeypatch)

    def miscomputes(engine: sw.Engine, member: int) -> None:
        def forward(_: Any, __: Any, output: Tensor) -> Tensor:
            return output * (1 + 2.0**-10) if engine.num_steps == 3 and torch.is_grad_enabled() else output

        if member == 2:
            engine.module.register_forward_hook(forward)

    found = race({**PLANS[name], "verify": VERIFIED}, miscomputes, tmp_path, loop="train_step")
    assert found == {0: 1, 1: 1, 3: 1}
    assert [(error.ranks, error.row, error.step) for error in wrong] == [((2,), "gradient", 4)]


BEFORE_UPDATE, IN_UPDATE = "all_reduce of verdict", "broadcast of buffers"


@sampled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("in_live", "point"), [(False, BEFORE_UPDATE), (False, IN_UPDATE), (True, BEFORE_UPDATE)])
def test_a_bit_flips_in_what_ranks_recover_from(in_live: bool, point: str, name: str, tmp_path: Path) -> None:
    """In the copy of member 2's state, or also in that itself, before member 1 dies: the copy is made again, or, where
    nothing else is left of that state, member 2 leaves too. What only it had is lost then."""
    flipped: list[str] = []
    dies = DiesBefore(1, 3, point)

    def flips_or_dies(engine: sw.Engine, member: int) -> None:
        def flip(_: int, step: int, what: str) -> bool:
            if (step, what) == (3, "exchange of any_rank") and not flipped:
                flip_a_bit(engine, in_live=in_live, in_image=True)
                flipped.append(what)
            return False

        dies(engine, member)
        if member == 2:
            membership = engine.world.membership
            assert isinstance(membership, ThreadMembership)
            membership.plant(partial(plant, flip))

    plan = {**PLANS[name], "verify": 1}
    if not in_live and point == BEFORE_UPDATE:
        assert race(plan, flips_or_dies, tmp_path).keys() == {0, 2, 3}
    elif not in_live and name == "ddp":  # that step counts, and is copied, unless a rank has not come so far
        assert race(plan, flips_or_dies, tmp_path, dies_of=CorruptionError).keys() >= {0, 3}
    elif name == "ddp":
        assert race(plan, flips_or_dies, tmp_path, dies_of=CorruptionError).keys() == {0, 3}
    else:
        with pytest.raises(StateError, match="no whole state is left"):
            race(plan, flips_or_dies, tmp_path, dies_of=CorruptionError)
    assert flipped
    assert dies.is_dead


@sampled
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
@pytest.mark.parametrize("name", ["zero1", "zero3"])
@pytest.mark.parametrize("in_live", [False, True])
def test_a_bit_flips_in_what_a_lost_rank_has_left(in_live: bool, name: str, hosts: str, tmp_path: Path) -> None:
    """In the copy of its state, or also in that itself. What has other sums than it had noted is not used: the one or
    the other is, or what others have under `zero1`, or another host's copy, or all restart."""

    def flips_and_dies(engine: sw.Engine, member: int) -> None:
        def flip(_: int, step: int, what: str) -> bool:
            if (step, what) == (3, BEFORE_UPDATE):
                flip_a_bit(engine, in_live=in_live, in_image=True)
                raise Killed
            return False

        if member == 1:
            membership = engine.world.membership
            assert isinstance(membership, ThreadMembership)
            membership.plant(partial(plant, flip))

    plan = {**PLANS[name], "verify": 1}
    if "b" in hosts or not in_live or name == "zero1":
        assert race(plan, flips_and_dies, tmp_path, hosts=hosts).keys() == {0, 2, 3}
    else:
        with pytest.raises(LostStateError, match="no whole state is left"):
            race(plan, flips_and_dies, tmp_path, hosts=hosts)


@pytest.mark.parametrize(("others", "leaves"), [([[3], [3, 4]], True), ([[3, 4], [3, 4]], False)])
def test_a_rank_leaves_if_a_copy_with_wrong_bits_was_all_that_it_had_in_common(
    others: list[list[int]], leaves: bool
) -> None:
    """It has made the update that others have not made, so that its copy of the step before is gone. In a race of ranks
    this happened once in some thirty."""
    told = [Report(4, 4, {}, 0, {0: versions}, [], 1, "", None) for versions in ([4], *others)]
    torn: list[int] = []
    survival = SimpleNamespace(image=SimpleNamespace(tear=lambda: torn.append(0)))
    progress = SimpleNamespace(progress=SimpleNamespace(num_steps=3))
    rank: Any = SimpleNamespace(
        _told_changed="",
        _lost_copy="parameter d.weight",
        survival=survival,
        _sharded=progress,
        world=SimpleNamespace(rank=0),
    )
    if leaves:
        with pytest.raises(CorruptionError, match=r"Rank 0 has wrong bits: parameter d\.weight"):
            Recovery._require_own_bits(rank, told)
    else:
        Recovery._require_own_bits(rank, told)
    assert len(torn) == leaves


def test_the_last_rank_goes_on_without_anybody_to_compute_again(tmp_path: Path) -> None:
    torch.manual_seed(3)
    models = [Net() for _ in range(2)]

    def work(world: World, member: int) -> int:
        own = models[member]
        engine = sw.shard(own, {"preset": "zero1", "verify": VERIFIED}, optimizer=adamw(own), world=world)
        DiesAt({1: 40})(engine, member)
        while engine.num_steps < NUM_STEPS:
            place, num = engine.data_ranks
            x, y = (whole.tensor_split(num)[place] for whole in batches()[engine.num_steps])
            engine.weigh(len(x), len(batches()[0][0]))
            engine.train_step(x, y, loss_fn=loss_of)
        engine.close()
        return engine.num_void

    assert run_members(2, work, tmp_path) == {0: 1}
