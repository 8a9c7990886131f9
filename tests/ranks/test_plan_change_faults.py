"""A disk that fails on one rank while the plan changes, or while a checkpoint is saved: all ranks raise the same error,
and what was there before, the old plan or the last checkpoint, still holds."""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_disks import BreakingOfOne
from twins import adamw, batches, train

import shardwise as sw
from shardwise.checkpoint import checkpoints_in
from shardwise.errors import CheckpointError, ShardwiseError, StateError, TierError
from shardwise.memory import disk_memory
from shardwise.system.disk import TierFolder
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled, thorough_only

Losses = Callable[[sw.World], list[float]]


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> BreakingOfOne:
    disk = BreakingOfOne()
    monkeypatch.setattr(disk_memory, "TierFolder", partial(TierFolder, calls=disk))
    return disk


def replicas_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [copy.deepcopy(model) for _ in range(2)]


def refused(told: dict[int, str], world: sw.World, kind: type[ShardwiseError], work: Callable[[], object]) -> None:
    """`work` raises the same error on both ranks; it is kept in `told`."""
    world.barrier()
    with pytest.raises(kind) as caught:
        work()
    told[world.rank] = str(caught.value)
    world.barrier()
    assert told[0] == told[1]


@sampled
@pytest.mark.parametrize("before", ["zero3", "infinity", "infinity elsewhere"])
@pytest.mark.parametrize("left", [0, 2])
def test_a_file_that_cannot_be_made_leaves_the_old_plan(
    before: str, left: int, tmp_path: Path, disk: BreakingOfOne
) -> None:
    """The first or a later one. Training goes on as if nobody had asked, and no file of the new plan is left."""
    model, data, told = Transformer(), batches(3, rows=12), dict[int, str]()
    former = {"preset": before.split()[0], "disk": str(tmp_path / ("other" if "elsewhere" in before else "one"))}
    new = {"preset": "infinity", "disk": str(tmp_path / "one"), "clip_grad_norm": 1.0}

    def run(fails: bool) -> Losses:
        replicas = replicas_of(model)

        def rank(world: sw.World) -> list[float]:
            replica = replicas[world.rank]
            with sw.shard(replica, former, optimizer=adamw(replica), world=world) as engine:
                losses = train(engine, data[:1])
                if fails:
                    world.barrier()
                    disk.breaks, disk.left, disk.code = "reserve", left, errno.ENOSPC
                    refused(told, world, TierError, lambda: engine.reshard(new))
                    assert "No space left on device (ENOSPC)" in told[0]
                    assert "shardwise-rank-1.rows-" in told[0]
                    assert engine.plan.clip_grad_norm is None
                    world.barrier()
                    disk.breaks = ""
                    former_disk = inside.disk(engine)
                    files = former_disk.folder._files if former_disk is not None else []
                    num_open = sum(file._close.alive for file in files)
                    assert num_open == sum(flat.rows is not None for flat in inside.flats(engine))
                    assert former_disk is not None or not any((tmp_path / "one").iterdir())
                losses += train(engine, data[1:2])
                engine.reshard(new)
                return losses + train(engine, data[2:])

        return rank

    assert run_ranks(2, run(fails=True)) == run_ranks(2, run(fails=False))


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "to the disk": ({"preset": "zero3"}, {"preset": "infinity"}, "write", 3),
    "from the disk": ({"preset": "infinity"}, {"preset": "zero2"}, "read", 2),
    "on the disk": ({"preset": "infinity"}, {"preset": "infinity", "precision": "bf16"}, "read", 0),
    "to another": ({"preset": "infinity"}, {"preset": "infinity", "disk": "other"}, "write", 1),
}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("case", MOVES)
def test_a_disk_that_fails_while_values_move_loses_nothing_that_a_checkpoint_has(
    case: str, tmp_path: Path, disk: BreakingOfOne
) -> None:
    """The new plan is in effect, and refuses everything until a resume has filled it."""
    first, second, verb, left = MOVES[case]
    torch.manual_seed(0)
    model, data, told = Transformer(), batches(3, rows=12), dict[int, str]()
    former, new = ({"disk": "one", **plan} for plan in (first, second))
    former["disk"], new["disk"] = str(tmp_path / former["disk"]), str(tmp_path / new["disk"])

    def run(fails: bool) -> Losses:
        replicas = replicas_of(model)

        def rank(world: sw.World) -> list[float]:
            replica, saved = replicas[world.rank], tmp_path / f"run-{fails}"
            with sw.shard(replica, former, optimizer=adamw(replica), world=world) as engine:
                losses = train(engine, data[:2])
                engine.save(saved)
                if fails:
                    world.barrier()
                    disk.breaks, disk.left = verb, left
                    refused(told, world, TierError, lambda: engine.reshard(new))
                    assert f"disk of rank 1 failed in a change of plan. {verb.title()[:4]}" in told[0]
                    assert "EIO" in told[0]
                    disk.breaks = ""
                    works: list[Callable[[], object]] = [
                        lambda: engine.save(saved, step=3),
                        lambda: engine.get("head.weight"),
                        lambda: engine(*data[2]),
                        lambda: engine.reshard("zero3"),
                    ]
                    for work in works:
                        with pytest.raises(StateError, match=r"A change of plan failed .* Go on from the last"):
                            work()
                    assert list(checkpoints_in(saved)) == [2]
                else:
                    engine.reshard(new)
                assert engine.resume(saved) is not None
                losses += train(engine, data[2:])
                engine.reshard("zero3")
                return losses

        return rank

    assert run_ranks(2, run(fails=True)) == run_ranks(2, run(fails=False))


def test_a_save_that_one_rank_cannot_read_for_leaves_the_last_checkpoint(tmp_path: Path, disk: BreakingOfOne) -> None:
    model, data, told = Transformer(), batches(3, rows=12), dict[int, str]()

    def run(fails: bool) -> Losses:
        replicas = replicas_of(model)

        def rank(world: sw.World) -> list[float]:
            replica, saved = replicas[world.rank], tmp_path / f"run-{fails}"
            plan = {"preset": "infinity", "disk": str(tmp_path / "scratch")}
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                losses = train(engine, data[:1])
                engine.save(saved)
                losses += train(engine, data[1:2])
                if fails:
                    world.barrier()
                    disk.breaks, disk.left = "read", 1
                    refused(told, world, CheckpointError, lambda: engine.save(saved))
                    assert "rank 1 reports: " in told[0]
                    assert "Input/output error (EIO)" in told[0]
                    disk.breaks = ""
                    assert list(checkpoints_in(saved)) == [1]
                losses += train(engine, data[2:])
                assert engine.resume(saved) is not None
                return losses + train(engine, data[1:])

        return rank

    assert run_ranks(2, run(fails=True)) == run_ranks(2, run(fails=False))
