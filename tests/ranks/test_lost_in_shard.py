"""A rank is lost inside `sw.shard`: the others raise there, and the launcher hears that all may begin again."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from split_models import TENSOR, Transformer

import shardwise as sw
from shardwise.comm import World
from shardwise.errors import CommError, ConfigError
from shardwise.testing import plant
from tests.ranks.threads_as_members import Killed, ThreadMembership, is_collective, run_members
from tests.thorough import sampled

PLANS: dict[str, dict[str, Any]] = {
    "zero1": {"preset": "zero1"},
    "stages": {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}, "tensor": TENSOR, "accumulate": 2},
    "ddp": {"preset": "ddp"},
    "zero3": {"preset": "zero3"},
    "offload": {"preset": "zero3-offload"},
}


def sharded(plan: Mapping[str, Any], nth: int, folder: Path) -> dict[int, bool | None]:
    """Rank 1 of four dies when it begins its `nth` collective in `shard`. By the other ranks, and it if it does not
    die: whether the launcher has heard that all may begin again; `None` where `shard` returns."""
    folder.mkdir()
    torch.manual_seed(1)
    model = Transformer()
    models = [copy.deepcopy(model) for _ in range(4)]

    def work(world: World, member: int) -> bool | None:
        membership, left = world.membership, [nth]
        assert isinstance(membership, ThreadMembership)

        def dies(_: int, __: int, what: str) -> bool:
            left[0] -= is_collective(what)
            if member == 1 and left[0] == 0:
                raise Killed
            return False

        membership.plant(partial(plant, dies))
        own = models[member]
        try:
            sw.shard(own, plan, optimizer=torch.optim.AdamW(own.parameters(), lr=1e-3), world=world)
        except CommError:
            return membership.has_given_up
        assert not membership.has_given_up
        return None

    return run_members(4, work, folder)


@sampled
@pytest.mark.parametrize("name", PLANS)
def test_whoever_hears_of_it_lets_all_begin_again(name: str, tmp_path: Path) -> None:
    num_points = 0
    while 1 not in (found := sharded(PLANS[name], num_points + 1, tmp_path / str(num_points))):
        num_points += 1
        assert False not in found.values()
        assert num_points > 1 or set(found.values()) == {True}
    assert num_points >= 3


def test_a_plan_that_is_refused_begins_nothing_again(tmp_path: Path) -> None:
    def work(world: World, _: int) -> bool:
        membership, own = world.membership, Transformer()
        assert isinstance(membership, ThreadMembership)
        with pytest.raises(ConfigError):
            sw.shard(own, {"preset": "zero1", "mesh": {"dp": 3}}, world=world)
        return membership.has_given_up

    assert run_members(2, work, tmp_path) == {0: False, 1: False}
