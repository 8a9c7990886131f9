"""Ranks are lost while their part of a checkpoint is being written in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.checkpoint import draft_notes, saver
from shardwise.comm import PostOffice, ThreadTransport, World
from shardwise.errors import CheckpointError
from tests.faults.exact_training import Model, alone, loader, loss_of, optimizer_of
from tests.ranks.test_lost_ranks import PLANS
from tests.ranks.test_lost_ranks_reads import num_ranks_of
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import sampled, thorough_only

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""The writing thread ends with `SystemExit`, as if its rank had ended."""

Tensor = torch.Tensor
NUM_STEPS = 3


def never_finishes(victim: int, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that writes a rank's file end with the rank, before the file exists."""
    write_rank = saver.write_rank
    scratch.mkdir()

    def but_not_the_victim(draft: Path, feed: Any, *more: Any) -> None:
        if feed.image.name == draft_notes.file_name(victim):
            write_rank(scratch, feed, *more)
            raise SystemExit
        write_rank(draft, feed, *more)

    monkeypatch.setattr(saver, "write_rank", but_not_the_victim)
    monkeypatch.setattr(draft_notes, "AFTER_FAULT_SECONDS", 0.1)


def trained(world: World, name: str, folder: Path, *, dies: bool, then: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Train, and return the error that closing the engine raised."""
    model = Model()
    engine = sw.shard(model, PLANS[name], optimizer=optimizer_of(model), world=world)
    with loader(engine.data_ranks, 1) as batches:
        for batch in batches:
            engine.backward(loss_of(model(batch["index"], batch["x"]), batch["weight"]))
            engine.step()
            if engine.num_steps == NUM_STEPS and engine.num_void == 0:
                engine.save(folder, wait=False, state={"mine": 5})
                if dies:
                    raise Killed
            if engine.num_steps == NUM_STEPS + (then == "step"):
                break
    engine.mean(1.0)
    monkeypatch.undo()
    if then != "close":
        engine.wait_for_save()
    try:
        engine.close()
    except CheckpointError as error:
        return str(error)
    return ""


@sampled
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("victim", [0, 2])
def test_what_a_lost_rank_has_not_finished_is_written_again(
    victim: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, folder = tmp_path / "images", tmp_path / "checkpoints"
    images.mkdir()
    never_finishes(victim, tmp_path / "scratch", monkeypatch)

    def work(world: World, member: int) -> str:
        return trained(world, name, folder, dies=member == victim, then="wait", monkeypatch=monkeypatch)

    num_ranks = num_ranks_of(name)
    assert list(run_members(num_ranks, work, images).values()) == [""] * (num_ranks - 1)
    model = Model()
    with sw.shard(
        model, "ddp", optimizer=optimizer_of(model), world=World(0, 1, ThreadTransport(PostOffice(), 0))
    ) as engine:
        loaded = engine.resume(folder)
        assert loaded is not None
        assert (loaded.step, loaded.state) == (NUM_STEPS, {"mine": 5})
        *_, (_, params) = alone(NUM_STEPS)
        for name, value in engine.state_dict().items():
            if name in params:
                assert (value.double() == params[name]).all(), name


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("then", ["close", "step"])
def test_one_that_cannot_be_written_again_is_an_error(
    then: str, victim: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step was taken since the save, or nobody waits for the save before closing, when rank 0 detects it."""
    images, folder = tmp_path / "images", tmp_path / "checkpoints"
    images.mkdir()
    never_finishes(victim, tmp_path / "scratch", monkeypatch)

    def work(world: World, member: int) -> str:
        try:
            return trained(world, name, folder, dies=member == victim, then=then, monkeypatch=monkeypatch)
        except CheckpointError as error:
            return str(error)

    by_member = run_members(num_ranks_of(name), work, images)
    found = [by_member[member] for member in sorted(by_member)]
    words = ["is not complete: a rank was lost while it was being written" in said for said in found]
    assert words == [True, *[then == "step"] * (len(found) - 1)], found
