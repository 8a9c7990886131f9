"""Two ranks are lost of four in replica groups of two: both of one group, or one of each, at once, one while the others
recover, or while a checkpoint is written. Losses and parameters are those of the unsharded model. `test_smaller_meshes`
has one of each at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from tests import inside
from tests.patience import PATIENCE
from tests.ranks.lost_groups import AXES, DiesBefore, race, race_while_saving
from tests.thorough import sampled

POINTS = {
    "tp": "agree * verdict tp *",
    "pp": "agree * verdict pp *",
    "sp": "all_reduce of verdict",
    "ep": "all_reduce of verdict",
}
SHARDED = ("zero1", "zero2", "zero3")


class DiesCopied(DiesBefore):
    """Not before its image has the step before, which copies on other ranks need not wait for."""

    def __call__(self, engine: sw.Engine, member: int) -> None:
        self._engine = engine
        super().__call__(engine, member)

    def _die(self) -> None:
        inside.survival(self._engine).await_copies()
        super()._die()


@sampled
@pytest.mark.parametrize("preset", SHARDED)
@pytest.mark.parametrize("pair", [(0, 1), (3, 2)])
@pytest.mark.parametrize("axis", POINTS)
def test_both_ranks_of_a_group_die_at_once(axis: str, pair: tuple[int, int], preset: str, tmp_path: Path) -> None:
    both = threading.Barrier(2)

    class DiesWithTheOther(DiesBefore):
        def _die(self) -> None:
            both.wait(PATIENCE)
            super()._die()

    faults = {rank: DiesWithTheOther(rank, 2, POINTS[axis]) for rank in pair}
    sizes = race(axis, preset, lambda engine, member: _plant(faults, engine, member), tmp_path)
    assert sizes.keys() == {0, 1, 2, 3} - set(pair)
    assert {one[-1] for one in sizes.values()} == {2}


@sampled
@pytest.mark.parametrize("preset", SHARDED)
@pytest.mark.parametrize("pair", [(0, 2), (1, 3), (3, 0), (1, 2)])
@pytest.mark.parametrize("subject", ["images", "recovery"])
@pytest.mark.parametrize("axis", POINTS)
def test_a_rank_of_the_other_group_dies_while_it_recovers(
    axis: str, subject: str, pair: tuple[int, int], preset: str, tmp_path: Path
) -> None:
    """What is left of the first group is a spare by then. The last rank of the other goes on alone, until the next
    iteration begins, with both."""
    first, second = pair
    in_recovery = DiesCopied(second % 2, 0, f"exchange of {subject}")  # by rank and steps of the world that follows
    faults = {first: DiesCopied(first, 2, POINTS[axis]), second: in_recovery}
    sizes = race(axis, preset, lambda engine, member: _plant(faults, engine, member), tmp_path, most_wrong=2)
    assert all(fault.is_dead for fault in faults.values())
    assert sizes.keys() == {0, 1, 2, 3} - set(pair)
    assert {one[-1] for one in sizes.values()} == {2}


@sampled
@pytest.mark.parametrize("preset", SHARDED)
@pytest.mark.parametrize("pair", [(0, 1), (2, 3), (0, 3), (1, 3)])
@pytest.mark.parametrize("axis", POINTS)
def test_two_ranks_die_while_a_checkpoint_is_written(
    axis: str, pair: tuple[int, int], preset: str, tmp_path: Path
) -> None:
    """The others write it again, and end with the parameters of the plain model."""
    both = threading.Barrier(2)

    def dies(member: int) -> bool:
        if member in pair:
            both.wait(PATIENCE)
        return member in pair

    assert race_while_saving(AXES[axis], preset, dies, tmp_path) == {0, 1, 2, 3} - set(pair)


def _plant(faults: dict[int, DiesBefore], engine: Any, member: int) -> None:
    if member in faults:
        faults[member](engine, member)
