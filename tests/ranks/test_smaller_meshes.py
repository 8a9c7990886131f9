"""No replica group is whole: those that are left split the layers over fewer ranks, and over as many as before when
others have come. test_lost_groups.py has what is the same with groups (there this is `tp alone`)."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from split_models import Transformer

from shardwise.parallel.outline import smaller_meshes
from shardwise.plan import load_plan
from shardwise.plan.mesh import Mesh
from tests.ranks.lost_groups import AXES, PRESETS, DiesBefore, race
from tests.ranks.test_lost_ranks import DiesAt
from tests.ranks.test_lost_ranks_table import DiesCopying
from tests.thorough import sampled, thorough_only


@thorough_only("slow; smaller tests beside it cover the same code")
def test_down_to_one_rank_which_has_the_whole_model(tmp_path: Path) -> None:
    sizes = race("tp alone", "zero1", DiesAt({0: 40}), tmp_path, mesh={"tp": 2})
    assert sizes.keys() == {1}
    assert sizes[1][-1] == 1


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_rest_of_two_groups_is_one(preset: str, rank: int, tmp_path: Path) -> None:
    """Rank 0 dies, and with its group gone another one: of another part, of its own, or the rest of its own group."""
    sizes = race("tp", preset, DiesAt({0: 60, rank: 90}), tmp_path)
    assert len(sizes) in (1, 2)
    assert {one[-1] for one in sizes.values()} <= {1, 2}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_both_groups_lose_a_rank_at_once(preset: str, tmp_path: Path) -> None:
    """Those that are left have all parts, and are a group."""
    both = threading.Barrier(2)

    class DiesWithTheOther(DiesBefore):
        def _die(self) -> None:
            both.wait(20)
            super()._die()

    fault, other = (DiesWithTheOther(rank, 2, "agree * verdict tp *") for rank in (0, 3))

    def plant(engine: Any, member: int) -> None:
        (fault if member == 0 else other)(engine, member)

    sizes = race("tp", preset, plant, tmp_path)
    assert sizes.keys() == {1, 2}
    assert sizes[1][-1] == 2


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_dies_while_its_state_is_copied(preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else has its parameters after that step, and the others may have no copy of the step before any more."""
    dies = DiesCopying(monkeypatch)
    sizes = race("tp alone", preset, dies, tmp_path, mesh={"tp": 4})
    assert dies.died
    assert {one[-1] for one in sizes.values()} == {2}


def test_meshes_that_a_model_can_have() -> None:
    def found(has_budget: bool = False, **mesh: int) -> Any:
        plan = load_plan(AXES["tp"].plan("zero1", mesh=mesh))
        return smaller_meshes(Transformer(), plan, Mesh.of(mesh, math.prod(mesh.values())), has_budget=has_budget)

    assert found(tp=4).meshes == ({"tp": 4}, {"tp": 2}, {"tp": 1})
    assert found(dp=2, tp=3).meshes == ({"dp": 1, "tp": 3}, {"dp": 1, "tp": 1})
    assert found(dp=2, tp=2, has_budget=True).meshes == ({"dp": 1, "tp": 2},)
    assert found(pp=2, tp=2).meshes == ()
    none = found(tp=2, has_budget=True)
    assert none.meshes == ()
    assert "budget" in none.why_none
