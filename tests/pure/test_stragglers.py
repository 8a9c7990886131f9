"""What a step would take without its stragglers, on simulated ranks whose durations are given."""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.cli.main import main
from shardwise.fit.replay import Replay, script_of, scripts_of
from shardwise.observe import read_record
from shardwise.observe.stragglers import LapOfRanks, Straggler, StragglerWindow, stragglers
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import pack, padded_numel, table_for
from shardwise.program import FlatSpec, StepProgram, UnitSpec, plan_step, straight_trace
from shardwise.program.places import OPTIMIZER
from shardwise.program.schedule import SCHEDULES, UNIT_COSTS, schedule_for, timed
from shardwise.system.telemetry import BETWEEN, DISK, LOADER, Lap, StepClock
from shardwise.testing import run_ranks
from tests.thorough import drawn, varies

Spent = dict[str, float]
USUAL = {"forward h.*": 0.3, "backward h.*": 0.6, OPTIMIZER: 0.05, LOADER: 0.01}
"""Of a step of a second, with what lies between steps."""
STEP = sum(USUAL.values()) + 0.04


def program(mesh: Mesh, preset: str = "zero3", num_layers: int = 3) -> StepProgram:
    """Of equal layers."""
    table = table_for(Plan(preset=preset), mesh).on(mesh)
    slots = pack([("weight", (64, 64))])
    flats = [FlatSpec(f"h.{n}", padded_numel(slots, mesh.world_size), 1, table, mesh) for n in range(num_layers)]
    units = tuple(UnitSpec(flat.name, (flat,)) for flat in flats)
    return plan_step(units, straight_trace(units))


def replay_of(preset: str = "zero3", **axes: int) -> Replay:
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    return Replay([script_of(program(mesh, preset), mesh)], mesh)


def lap(more: Spent | None = None, *, between: float = 0.04, disk: float = 0.0, **waited: float) -> Lap:
    """One step of a rank that takes `more` than usual, or less."""
    spent = {place: USUAL.get(place, 0.0) + (more or {}).get(place, 0.0) for place in {**USUAL, **(more or {})}}
    seconds = sum(spent.values()) + between + disk + sum(waited.values())
    return Lap(seconds, between + spent[LOADER], waited, disk, spent)


def found(
    replay: Replay, of_step: Callable[[int, int], Lap], *, num_steps: int = 50, weights: list[float] | None = None
) -> list[Straggler]:
    """`of_step(step, rank)` has what a rank did."""
    ranks = range(replay.mesh.world_size)
    window = [
        LapOfRanks([of_step(step, rank) for rank in ranks], 1, weights or [1.0] * len(ranks))
        for step in range(num_steps)
    ]
    return stragglers(window, replay)


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize(
    ("late", "place", "words"),
    [
        (lap({LOADER: 0.21}), LOADER, "rank 5 costs 210 ms of a step (17%), in its loader"),
        (lap({"backward h.*": 0.21}), "backward h.*", "rank 5 costs 210 ms of a step (17%), in backward h.*"),
        (lap({OPTIMIZER: 0.21}), OPTIMIZER, "rank 5 costs 210 ms of a step (17%), in the optimizer"),
        (lap(disk=0.21), DISK, "rank 5 costs 210 ms of a step (17%), waiting for its disk"),
        (
            lap(between=0.25),
            BETWEEN,
            "rank 5 costs 210 ms of a step (17%), in what lies between steps (data, logging, saving)",
        ),
    ],
)
def test_a_late_rank_costs_what_it_is_late_by(preset: str, late: Lap, place: str, words: str) -> None:
    one = found(replay_of(preset, dp=8), lambda _, rank: late if rank == 5 else lap())
    assert [(each.kind, each.ranks, each.place) for each in one] == [("ranks", (5,), place)]
    assert one[0].seconds == pytest.approx(0.21)
    assert str(one[0]) == words


def test_of_two_ranks_the_later_one_is_named() -> None:
    one = found(replay_of(dp=2), lambda _, rank: lap({LOADER: 0.2}) if rank else lap())
    assert [(each.ranks, each.seconds) for each in one] == [((1,), pytest.approx(0.2))]


@varies
@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("num_ranks", [2, 3, 8, 40])
def test_equal_ranks_with_noise_have_no_straggler(num_ranks: int, spread: float) -> None:
    replay = replay_of(dp=num_ranks)
    for seed in range(drawn(3, 50)):
        noise = random.Random(seed)

        def of_step(_: int, __: int, noise: random.Random = noise) -> Lap:
            return lap({place: seconds * noise.uniform(-spread, spread) for place, seconds in USUAL.items()})

        assert found(replay, of_step) == []


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.3])
def test_a_loader_that_is_slow_on_all_ranks_names_none(spread: float) -> None:
    noise = random.Random(1)

    def of_step(_: int, __: int) -> Lap:
        return lap({LOADER: noise.uniform(1 - spread, 1 + spread)})

    for preset, axes in MESHES:
        assert found(replay_of(preset, **axes), of_step) == [], (preset, axes)


def test_a_straggler_is_found_among_noise() -> None:
    noise = random.Random(0)

    def of_step(_: int, rank: int) -> Lap:
        more = {place: seconds * noise.uniform(-0.1, 0.1) for place, seconds in USUAL.items()}
        return lap({**more, LOADER: 0.2 if rank == 3 else 0.0})

    (one,) = found(replay_of(dp=8), of_step)
    assert (one.ranks, one.place) == ((3,), LOADER)
    assert one.seconds == pytest.approx(0.2, rel=0.1)


MESHES: list[tuple[str, dict[str, int]]] = [
    *((preset, {"dp": size}) for preset in ("ddp", "zero1", "zero3") for size in (2, 3, 8, 16)),
    *(("hsdp", {"node": nodes, "local": local}) for nodes, local in ((2, 2), (2, 4), (4, 2), (3, 4))),
]


def waited_for(mesh: Mesh, cause: tuple[int, ...], late: float, rank: int) -> Spent:
    """Along which axis `rank` waits for the ranks of the `cause`, if they all come `late`: the innermost along which it
    meets one."""
    if rank in cause:
        return {}
    near = [axis for axis in reversed(mesh.axes) if set(mesh.among(rank, (axis,))) & set(cause)]
    return {near[0] if near else mesh.axes[0]: late}


@varies
def test_whatever_is_slow_is_named_with_its_ranks() -> None:
    """A loader, a computation, the update, a disk, what lies between steps, or a link, among noise; the other ranks
    wait for it, each along an axis."""
    for seed in range(drawn(20, 400)):
        numbers = random.Random(seed)
        preset, axes = numbers.choice(MESHES)
        mesh = Mesh(tuple(axes), tuple(axes.values()))
        links = list(mesh.axes) if len(axes) > 1 else []
        place = numbers.choice([LOADER, "forward h.*", "backward h.*", OPTIMIZER, DISK, BETWEEN, *links])
        rank, seconds, spread = numbers.randrange(mesh.world_size), numbers.uniform(0.08, 0.5), numbers.uniform(0, 0.1)
        is_link = place in links
        cause = tuple(mesh.among(rank, (place,))) if is_link else (rank,)

        def of_step(_: int, one: int) -> Lap:
            more = {each: usual * numbers.uniform(-spread, spread) for each, usual in USUAL.items()}  # noqa: B023
            waited = waited_for(mesh, cause, seconds, one)  # noqa: B023
            if one not in cause:  # noqa: B023
                return lap(more, **waited)
            if is_link:  # noqa: B023
                return lap(more, **{place: seconds})  # noqa: B023
            if place in (DISK, BETWEEN):  # noqa: B023
                return lap(more, **({"disk": seconds} if place == DISK else {"between": 0.04 + seconds}))  # noqa: B023
            return lap({**more, place: more[place] + seconds})  # noqa: B023

        named = found(replay_of(preset, **axes), of_step)
        assert [(one.kind, one.ranks, one.place) for one in named] == [
            ("link" if is_link else "ranks", cause, place)
        ], (
            seed,
            preset,
            axes,
            place,
            cause,
            [str(one) for one in named],
        )
        assert named[0].seconds == pytest.approx(seconds, abs=spread * STEP + 0.01), (seed, "but for what others vary")


def test_two_stragglers() -> None:
    """In different places of the step they add up, but for the few layers by which gathers run ahead; at the same time
    the later one hides the other."""
    mesh = Mesh(("dp",), (4,))
    replay = Replay([script_of(program(mesh, num_layers=100), mesh)], mesh)
    apart = {1: lap({"forward h.*": 0.3}), 2: lap({"backward h.*": 0.2})}
    first, second = found(replay, lambda _, rank: apart.get(rank, lap()))
    assert (first.ranks, first.place, first.seconds) == ((1,), "forward h.*", pytest.approx(0.3, rel=0.06))
    assert (second.ranks, second.place, second.seconds) == ((2,), "backward h.*", pytest.approx(0.2, rel=0.1))

    at_once = {1: lap({LOADER: 0.3}), 2: lap({LOADER: 0.2})}
    together, alone = found(replay, lambda _, rank: at_once.get(rank, lap()))
    assert (alone.ranks, alone.seconds) == ((1,), pytest.approx(0.1))
    assert (together.ranks, together.seconds) == ((1, 2), pytest.approx(0.3))

    equal = found(replay, lambda _, rank: lap({LOADER: 0.2}) if rank in (1, 2) else lap())
    assert [str(one) for one in equal] == ["ranks 1 and 2 cost 200 ms of a step (17%) together, in its loader"]


def test_ranks_that_are_late_in_turns_cost_something_each() -> None:
    def of_step(step: int, rank: int) -> Lap:
        return lap({LOADER: 0.2}) if rank == 1 + step % 2 else lap()

    one, other = found(replay_of(dp=4), of_step)
    assert {one.ranks, other.ranks} == {(1,), (2,)}
    assert one.seconds == other.seconds == pytest.approx(0.1)
    assert str(one).endswith("in its loader, in 50% of steps")


def test_one_long_step_makes_no_straggler() -> None:
    assert found(replay_of(dp=4), lambda step, rank: lap(between=5) if (step, rank) == (7, 2) else lap()) == []


def test_a_few_steps_name_nobody() -> None:
    assert found(replay_of(dp=4), lambda _, rank: lap({LOADER: 1.0}) if rank == 1 else lap(), num_steps=19) == []


def test_more_samples_may_compute_longer_but_not_read_longer() -> None:
    twice = lap({"forward h.*": 0.3, "backward h.*": 0.6})
    weights = [0.8, 1.6, 0.8, 0.8]
    assert found(replay_of(dp=4), lambda _, rank: twice if rank == 1 else lap(), weights=weights) == []
    (one,) = found(replay_of(dp=4), lambda _, rank: lap({LOADER: 0.2}) if rank == 1 else lap(), weights=[1.0] * 4)
    assert one.ranks == (1,)


def test_what_is_hidden_costs_nothing() -> None:
    """Ranks under ddp wait for each other at the end of their backward: one that reads longer and computes shorter is
    not late there."""
    late = lap({LOADER: 0.2, "backward h.*": -0.2})
    assert found(replay_of("ddp", dp=3), lambda _, rank: late if rank == 1 else lap()) == []


def test_a_slow_link_is_that_of_its_group() -> None:
    def of_step(_: int, rank: int) -> Lap:
        return lap(node=0.35 if rank in (1, 3) else 0.1, local=0.05)

    (one,) = found(replay_of("hsdp", node=2, local=2), of_step)
    assert (one.kind, one.ranks, one.place) == ("link", (1, 3), "node")
    assert one.seconds == pytest.approx(0.25)
    assert str(one) == (
        "messages along node of ranks 1 and 3 cost 250 ms of a step (18%) more than those of other ranks"
    )


def pipeline(**axes: int) -> Replay:
    mesh = Mesh(tuple(axes), tuple(axes.values()))
    return Replay(scripts_of(schedule_for("1f1b", mesh.size("pp"), 4), mesh), mesh)


def test_uneven_stages_are_no_straggler() -> None:
    """Ranks 0 and 1 have the first stage, 2 and 3 the second, which computes longer."""
    slow = lap({"forward h.*": 0.2, "backward h.*": 0.4})
    (one,) = found(pipeline(pp=2, dp=2), lambda _, rank: slow if rank > 1 else lap())
    assert (one.kind, one.ranks) == ("stages", (2, 3))
    assert "uneven stages cost" in str(one)
    assert str(one).endswith(": pp 1 (ranks 2 and 3) computes longest")


def test_a_slow_rank_of_a_pipeline_is_compared_with_its_own_stage() -> None:
    slow = lap({"forward h.*": 0.2, "backward h.*": 0.4})
    (one,) = found(pipeline(pp=2, dp=2), lambda _, rank: slow if rank == 2 else lap())
    assert (one.kind, one.ranks) == ("ranks", (2,))
    assert one.seconds == pytest.approx(0.6)


def test_all_ranks_of_a_pipeline_read_alike() -> None:
    """What the first stage waits for costs a step, what the last one does is hidden while the pipeline fills."""

    def of_reader(late: int) -> list[Straggler]:
        return found(pipeline(pp=4), lambda _, rank: lap({LOADER: 0.2}) if rank == late else lap())

    (one,) = of_reader(0)
    assert (one.kind, one.ranks, one.place) == ("ranks", (0,), LOADER)
    assert one.seconds == pytest.approx(0.2)
    assert of_reader(3) == []


def test_without_another_rank_of_the_stage_it_may_be_either() -> None:
    slow = lap({"forward h.*": 0.2, "backward h.*": 0.4})
    (one,) = found(pipeline(pp=2), lambda _, rank: slow if rank else lap())
    assert (one.kind, one.ranks) == ("stages", (1,))
    assert str(one).endswith(": pp 1 (rank 1) computes longest, unless its only rank is slow")


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_schedule_takes_as_long_as_by_its_own_clock(name: str) -> None:
    schedule = schedule_for(name, 4, 8, SCHEDULES[name].usual_chunks)
    mesh = Mesh(("pp", "dp"), (4, 2))
    kinds = [Counter(op.kind for op in schedule.rows[rank // 2]) for rank in range(8)]
    spent = {
        "forward h.*": [UNIT_COSTS["F"] * of_rank["F"] for of_rank in kinds],
        "backward h.*": [UNIT_COSTS["B"] * of_rank["B"] + UNIT_COSTS["I"] * of_rank["I"] for of_rank in kinds],
        "weights h.*": [UNIT_COSTS["W"] * of_rank["W"] for of_rank in kinds],
    }
    work = {place: np.full((3, 8), seconds) for place, seconds in spent.items()}
    replayed = Replay(scripts_of(schedule, mesh), mesh).seconds(work, {})
    assert replayed == pytest.approx([timed(schedule).length] * 3)


def test_a_warning_comes_once_and_again_when_it_has_doubled() -> None:
    window = StragglerWindow(20, 0.1)

    def news(late: float) -> list[str]:
        for _ in range(24 if window.num_steps == 0 else 20):
            window.add(LapOfRanks([lap({LOADER: late}), lap(), lap()], 1, [1.0] * 3))
        return [str(one) for one in window.news(window.close(replay_of(dp=3)))]

    assert news(0.05) == []  # below the share
    assert news(0.2) == ["rank 0 costs 200 ms of a step (17%), in its loader"]
    assert news(0.25) == []
    assert news(0.5) == ["rank 0 costs 500 ms of a step (33%), in its loader"]


class Times(threading.local):
    """The time of each rank's thread, which passes when it is told to."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Source:
    """Rows that take the second rank longer to read."""

    def __init__(self, times: Times, seconds: Callable[[], float]) -> None:
        self._times, self._seconds = times, seconds

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        self._times.seconds += self._seconds()
        return torch.ones(4)


class Layer(nn.Linear):
    """Takes 10 ms."""

    def __init__(self, times: Times) -> None:
        super().__init__(4, 4)
        self._times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._times.seconds += 0.01
        return super().forward(x)


def test_a_recorded_run_says_it_in_its_log_record_and_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the clocks of three ranks, of which one has a slow loader, to what people read."""
    times, here = Times(), threading.local()
    torch.manual_seed(0)
    models = [nn.Sequential(OrderedDict(h=nn.Sequential(Layer(times), Layer(times)))) for _ in range(3)]
    plan = {"preset": "zero3", "run": str(tmp_path / "run"), "slow": {"steps": 20}, "units": ["h.*"]}

    def rank(world: sw.World) -> None:
        here.rank = world.rank
        world.journal.clock = StepClock(times)
        model = models[world.rank]
        source = Source(times, lambda: 0.02 if here.rank == 1 else 0.001)
        with sw.shard(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world) as engine:
            loader = sw.data.Loader(source, batch_rows=6, steps=24, workers=0, world=engine.data_ranks)
            for batch in loader:
                loss = engine(batch).sum()
                engine.backward(loss)
                engine.step()
                engine.log({"loss": loss})

    with caplog.at_level(logging.WARNING, logger="shardwise"):
        run_ranks(3, rank)
    words = "rank 1 costs 38 ms of a step (63%), in its loader"
    assert f"{words}, over 20 steps" in [record.getMessage() for record in caplog.records]
    record = read_record(tmp_path / "run" / "record.jsonl")
    (line,) = [line for line in record.lines if line["kind"] == "stragglers"]
    assert [one["words"] for one in line["found"]] == [words]
    rows = next(line["ranks"] for line in reversed(record.lines) if line["kind"] == "ranks")
    assert rows[1]["spent"][LOADER] == pytest.approx(0.04)
    assert rows[0]["spent"]["forward h.*"] == pytest.approx(0.02)
    main(["top", str(tmp_path / "run"), "--once"])
    assert words in " ".join(capsys.readouterr().out.split())
    main(["report", str(tmp_path / "run")])
    assert words in (tmp_path / "run" / "report.html").read_text()
