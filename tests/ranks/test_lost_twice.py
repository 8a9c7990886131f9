"""Two ranks are lost of four in replica groups of two: both of one group, or one of each, at once, one while the others
recover, or while a checkpoint is written. Losses and parameters are those of the unsharded model. `test_smaller_meshes`
has one of each at once."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import PostOffice, ThreadTransport, World
from tests import inside
from tests.patience import PATIENCE
from tests.ranks.lost_groups import AXES, BOUND, NUM_STEPS, DiesBefore, race, trained_alone
from tests.ranks.test_lost_ranks import adamw, assert_same_values
from tests.ranks.threads_as_members import Killed, run_members
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
    own, images, folder = AXES[axis], tmp_path / "images", tmp_path / "checkpoints"
    images.mkdir()
    torch.manual_seed(3)
    task = own.ways[own.usual][0]()
    model = task.make()
    _, plain = trained_alone(task, model)
    models = [copy.deepcopy(model) for _ in range(5)]
    plan, loop = own.plan(preset), own.loops[0]
    both = threading.Barrier(2)

    def work(world: World, member: int) -> dict[str, Any]:
        engine = sw.shard(models[member], plan, optimizer=(optimizer := adamw(models[member])), world=world)
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            task.take_step(loop, engine, optimizer, step, *engine.data_ranks)
            if engine.num_steps == NUM_STEPS and step < NUM_STEPS and engine.num_void == 0:
                engine.save(folder, wait=False)
                inside.survival(engine).await_copies()
                if member in pair:
                    both.wait(PATIENCE)
                    raise Killed
        engine.mean(1.0)
        engine.wait_for_save()
        state = engine.state_dict()
        engine.close()
        return state

    found = run_members(4, work, images)
    assert found.keys() == {0, 1, 2, 3} - set(pair)
    for state in found.values():
        assert_same_values(state, plain, BOUND)
    alone = models[4]
    with sw.shard(alone, "ddp", optimizer=adamw(alone), world=World(0, 1, ThreadTransport(PostOffice(), 0))) as engine:
        assert engine.resume(folder) is not None
        assert_same_values(engine.state_dict(), plain, BOUND)


def _plant(faults: dict[int, DiesBefore], engine: Any, member: int) -> None:
    if member in faults:
        faults[member](engine, member)
