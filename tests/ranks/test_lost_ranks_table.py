"""The table of docs/elastic-protocol.md: under every preset, a rank dies at a given place, and the others continue."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.elastic.state_image import TORN
from shardwise.elastic.survival import Survival
from shardwise.testing import fail_at, plant
from tests.ranks.test_lost_ranks import NUM_RANKS, PLANS, TIERS, race
from tests.ranks.threads_as_members import Killed, is_collective
from tests.thorough import sampled

VICTIM, AT = 1, 2
"""The rank that dies, and after how many steps."""

PLACES = {
    "a gather": "gather * B*",
    "a reduction": "*reduce* B*",
    "what is agreed before the verdict": "* of closings",
    "the verdict": "* of verdict",
    "the buffers' broadcast": "broadcast *",
    "the message that ends a step": "* of commit",
    "engine.mean": "* of weighed mean",
    "engine.any_rank": "* of any_rank",
}
"""For each purpose, the action of the program, with its bytes, or the collective that serves it."""


class DiesIn:
    """A rank dies as it comes to `place`, after the given number of steps."""

    def __init__(self, place: str, after: int) -> None:
        self._fault = fail_at(VICTIM, after, place, by=self._die)
        self.died = False

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member == VICTIM:
            plant(self._fault, engine.world)

    def _die(self) -> None:
        self.died = True
        raise Killed


class DiesInModule:
    """A rank dies in the forward or the backward of a module."""

    def __init__(self, *, in_backward: bool) -> None:
        self._in_backward = in_backward
        self.died = False

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != VICTIM:
            return

        def die(*_: Any) -> None:
            if engine.num_steps >= AT:
                self.died = True
                raise Killed

        norm = engine.module.get_submodule("norm")
        if self._in_backward:
            norm.register_full_backward_hook(die)
        else:
            norm.register_forward_hook(die)


class DiesCopying:
    """A rank dies while the state of its last step is copied in the background: half of the copy is there, in the
    place of the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy, self._wait = Survival._copy, Survival.await_copies
        self.is_copying = self.died = False
        dies = self

        def or_half(survival: Survival, step: int) -> None:
            if step == AT and f"rank{VICTIM}" in survival.place.name:
                dies._copy_half(survival)
            else:
                dies._copy(survival, step)

        def or_die(survival: Survival) -> None:
            dies._wait(survival)
            is_victim = f"rank{VICTIM}" in survival.place.name and not dies.died  # later it is the name of another
            if is_victim and dies.is_copying:  # it would wait for ever
                dies.died = True
                raise Killed

        monkeypatch.setattr(Survival, "_copy", or_half)
        monkeypatch.setattr(Survival, "await_copies", or_die)

    def _copy_half(self, survival: Survival) -> None:
        image = survival.image
        image.shadow_version = TORN
        half = image.directory.changing_bytes // 2  # what never changes was copied at first
        image.region(is_live=False)[:half].zero_()
        self.is_copying = True

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != VICTIM:
            return

        def or_die(_: int, __: int, what: str) -> bool:
            if self.is_copying and is_collective(what):
                self.died = True
                raise Killed
            return False

        plant(or_die, engine.world)


@sampled
@pytest.mark.parametrize("name", [*PLANS, "offload", "zero3-offload", "a share"])
def test_a_rank_dies_while_its_state_is_copied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = DiesCopying(monkeypatch)
    void = race({**TIERS, **PLANS}[name], dies, tmp_path, shares_memory=False)
    assert dies.died
    assert set(void) == set(range(NUM_RANKS)) - {VICTIM}


@sampled
@pytest.mark.parametrize("loop", ["engine", "plain", "train_step"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", PLANS)
def test_a_rank_dies_in(name: str, place: str, loop: str, tmp_path: Path) -> None:
    if place == "a gather" and name == "ddp":
        pytest.skip("nothing is gathered")
    dies = DiesIn(PLACES[place], after=0 if "agreed" in place else AT)  # agreed only once, as long as nothing changes
    void = race(PLANS[name], dies, tmp_path, loop=loop, shares_memory=False)
    assert dies.died
    assert sorted(void) == [rank for rank in range(NUM_RANKS) if rank != VICTIM]


@sampled
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_a_rank_dies_in_its_module(name: str, in_backward: bool, tmp_path: Path) -> None:
    dies = DiesInModule(in_backward=in_backward)
    void = race(PLANS[name], dies, tmp_path)
    assert dies.died
    assert set(void) == set(range(NUM_RANKS)) - {VICTIM}
    assert set(void.values()) == {1}, "the step is repeated, once"


def test_every_test_that_the_table_names_exists() -> None:
    tests = Path(__file__).parents[1]
    named = set(re.findall(r"`(test_\w+)`", (tests.parent / "docs" / "elastic-protocol.md").read_text()))
    defined = {
        name for path in tests.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15
    assert named <= defined
