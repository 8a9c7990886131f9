"""Ranks that come in the place of dead ones: they and the others take the same steps from then on, wherever the others
stood when one died."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.comm import World
from shardwise.comm.generation import RECORD_PATH
from shardwise.monitor import read_record
from tests.ranks.test_lost_ranks import NUM_RANKS, NUM_STEPS, ROWS, DiesAt, Net, adamw, batches, loss_of, trained_alone
from tests.ranks.threads_that_die import Killed, run_mortals
from tests.thorough import drawn

Point = Callable[[sw.Engine, int, int, str], None]


def nothing(engine: sw.Engine, member: int, step: int, point: str) -> None:
    pass


def trained(
    folder: Path,
    *,
    plan: dict[str, Any],
    deaths: dict[int, int] | None = None,
    at: Point = nothing,
    num_newcomers: int = 1,
    least: int = 1,
    most_wrong: int = 0,
) -> list[list[int]]:
    """A loop that asks the others something wherever one can; returns the sizes of the worlds in which each rank that
    lives to the end took its steps."""
    images, run = folder / "images", folder / "run"
    images.mkdir()
    model = Net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS + num_newcomers)]
    losses, plain = trained_alone(model, adamw, clip=None, scheduled=False)

    def work(world: World, member: int) -> tuple[dict[int, float], dict[str, Any], list[int]]:
        own = models[member]
        engine = sw.shard(own, {**plan, "run": str(run)}, optimizer=adamw(own), world=world)
        engine.log({"loss": 0.0}, kind="validation")
        engine.world.barrier()
        DiesAt(deaths or {})(engine, member)
        found, sizes = {}, []
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            at(engine, member, step, "begin")
            assert not engine.any_rank(False)
            x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[step])
            engine.weigh(len(x), ROWS)
            loss = loss_of(own(x), y)
            at(engine, member, step, "forward")
            mean = engine.mean(loss.item())
            at(engine, member, step, "backward")
            engine.backward(loss)
            at(engine, member, step, "step")
            engine.step()
            size = engine.world.size
            at(engine, member, step, "log")
            engine.log({"loss": loss.item()})
            at(engine, member, step, "save")
            if engine.num_steps > step:
                found[step] = mean
                sizes.append(size)
        state = engine.state_dict()
        engine.close()
        return found, state, sizes

    results = run_mortals(NUM_RANKS, work, images, num_newcomers=num_newcomers, least=least)
    assert results
    for found, state, _ in results.values():
        wrong = [step for step, loss in found.items() if loss != pytest.approx(losses[step], rel=1e-5)]
        assert len(wrong) <= most_wrong
        for name, whole in plain.state_dict().items():
            assert (state[name] - whole).abs().max() <= 2e-6 * max(1.0, whole.abs().max()), name
    steps = [line["step"] for line in read_record(run / "record.jsonl").lines if line["kind"] == "step"]
    assert steps == list(range(1, NUM_STEPS + 1))
    assert [path.name for path in images.iterdir()] == [RECORD_PATH]
    return [sizes for _, _, sizes in results.values()]


@pytest.mark.parametrize("point", ["begin", "forward", "backward", "step", "log", "save"])
def test_one_that_comes_with_a_death_comes_where_the_others_begin(point: str, tmp_path: Path) -> None:
    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) == (1, 2, point):
            raise Killed

    sizes = trained(tmp_path, plan={"preset": "zero2"}, at=at)
    assert len(sizes) == NUM_RANKS
    assert all(found == [NUM_RANKS] * len(found) for found in sizes), "it waited already: no step without it"
    assert sorted(map(len, sizes))[0] < sorted(map(len, sizes))[-1] == NUM_STEPS


@pytest.mark.parametrize("point", ["forward", "log"])
def test_too_few_take_no_step_until_one_has_come(point: str, tmp_path: Path) -> None:
    def at(engine: sw.Engine, member: int, step: int, now: str) -> None:
        if (member, step, now) in ((0, 2, point), (3, 3, point)):
            raise Killed

    sizes = trained(tmp_path, plan={"preset": "zero3"}, at=at, num_newcomers=2, least=NUM_RANKS)
    assert len(sizes) == NUM_RANKS
    assert {size for found in sizes for size in found} == {NUM_RANKS}


def test_wherever_ranks_die_and_others_come(tmp_path: Path) -> None:
    for number in range(drawn(2, 12)):
        folder = tmp_path / str(number)
        folder.mkdir()
        deaths = {number % 2: 11 + 4 * number, 2: 60 - 3 * number}
        trained(folder, plan={"preset": ("zero3", "ddp")[number % 2]}, deaths=deaths, num_newcomers=2, most_wrong=2)
