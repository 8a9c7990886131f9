"""The record of a run that loses ranks has each step once, with the values of the iteration that counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.comm import World
from shardwise.elastic.session import ElasticSession
from shardwise.errors import TurnedAwayError
from shardwise.observe import read_record
from shardwise.observe.record import RunRecord
from tests import inside
from tests.ranks.test_lost_ranks import NUM_RANKS, NUM_STEPS, ROWS, DiesAt, Net, adamw, batches, loss_of, trained_alone
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import drawn, sampled, varies

Befall = Callable[[World, int, int], None]


def trained(
    folder: Path,
    plant: Callable[[sw.Engine, int], None],
    *,
    early: bool = False,
    befall: Befall = lambda *_: None,
    most_wrong: int = 0,
) -> Path:
    """A loop that logs in every iteration, void or not; with `early`, before the step. Returns the record's path."""
    run, images = folder / "run", folder / "images"
    images.mkdir()
    model = Net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> None:
        own = models[member]
        engine = sw.shard(own, {"preset": "zero2", "run": str(run)}, optimizer=adamw(own), world=world)
        plant(engine, member)
        while engine.num_steps < NUM_STEPS:
            step, void = engine.num_steps, engine.num_void
            x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[step])
            engine.weigh(len(x), ROWS)
            loss = loss_of(own(x), y)
            engine.backward(loss)
            if early:
                engine.log({"loss": loss.item(), "void": 0}, samples=len(x))
            befall(engine.world, member, step)
            engine.step()
            if not early:
                told = {"loss": loss.item(), "void": engine.num_void - void}
                engine.log(told, tokens=NUM_RANKS * 120 // engine.world.size, samples=len(x))
            if engine.num_steps % 2 == 0:
                engine.log({"loss": loss.item(), "void": engine.num_void - void}, kind="validation")
        engine.close()

    run_members(NUM_RANKS, work, images)
    losses, _ = trained_alone(model, adamw, clip=None, scheduled=False)
    lines = read_record(run / "record.jsonl").lines
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(NUM_STEPS) if early else range(1, NUM_STEPS + 1))
    assert sum(line["void"] for line in steps) == 0
    wrong = [line for line, loss in zip(steps, losses, strict=True) if line["loss"] != pytest.approx(loss, rel=1e-5)]
    assert len(wrong) <= most_wrong
    if not early:
        assert most_wrong or [line["tokens"] for line in steps] == [NUM_RANKS * 120 * line["step"] for line in steps]
        validations = [line for line in lines if line["kind"] == "validation"]
        assert [(line["step"], line["void"]) for line in validations] == [(2, 0), (4, 0), (6, 0)]
    assert [line["status"] for line in lines if line["kind"] == "end"] == ["ended"]
    assert lines[-1]["kind"] == "end"
    return run / "record.jsonl"


@sampled
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("lost", [0, 2])
def test_what_is_logged_in_a_void_iteration_is_not_written(lost: int, early: bool, tmp_path: Path) -> None:
    def befall(world: World, member: int, step: int) -> None:
        if member == lost and step == 3:
            raise Killed

    path = trained(tmp_path, lambda engine, member: None, early=early, befall=befall)
    assert [line["world_size"] for line in read_record(path).lines if line["kind"] == "resume"] == [NUM_RANKS - 1]


@sampled
@pytest.mark.parametrize("at", [("step", 1), ("step", 3), ("validation", 2), ("step", NUM_STEPS)])
def test_what_rank_0_did_not_come_to_write_the_next_one_does(
    at: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 dies when the ranks have exchanged what they log."""
    write, deaths = RunRecord.write, [at]

    def or_die(self: RunRecord, kind: str, *, step: int, **values: Any) -> None:
        if (kind, step) in deaths:
            deaths.clear()
            raise Killed
        write(self, kind, step=step, **values)

    monkeypatch.setattr(RunRecord, "write", or_die)
    trained(tmp_path, lambda engine, member: None)
    assert not deaths


@sampled
@varies
@pytest.mark.parametrize("early", [False, True])
def test_wherever_a_rank_dies_each_step_is_there_once(early: bool, tmp_path: Path) -> None:
    for number in range(drawn(1, 8)):
        folder = tmp_path / str(number)
        folder.mkdir()
        trained(folder, DiesAt({number % 2: 11 + 5 * number}), early=early, most_wrong=1)  # its own loss may be missing


def test_a_rank_that_is_turned_away_leaves_the_record_to_the_others(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder = tmp_path / "images"
    folder.mkdir()

    def work(world: World, member: int) -> None:
        own = Net()
        engine = sw.shard(own, {"preset": "zero2", "run": str(run)}, optimizer=adamw(own), world=world)
        for step in (0, 1):
            if member == 0 and step == 1:
                assert isinstance(inside.session(engine), ElasticSession)
                with pytest.raises(TurnedAwayError):
                    inside.recovery(engine).recover(TurnedAwayError("The others go on."))
                engine.close()
                raise Killed
            x, y = batches()[step]
            engine.backward(loss_of(own(x), y))
            engine.step()
            engine.log({"loss": 1.0})
        while engine.num_steps < 2:
            x, y = batches()[1]
            engine.backward(loss_of(own(x), y))
            engine.step()
            engine.log({"loss": 1.0})
        engine.close()

    run_members(2, work, folder)
    lines = read_record(run / "record.jsonl").lines
    assert [line["status"] for line in lines if line["kind"] == "end"] == ["ended"]
    assert lines[-1]["kind"] == "end"
