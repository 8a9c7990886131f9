"""Slow ranks of a running job: found over a window, with evidence, by the plan's factor."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.observe.slowness import SlowWindow, judge
from shardwise.system.telemetry import StepClock
from shardwise.testing import run_ranks


def row(computing: float, idle: float = 0.0, disk: float = 0.0, **waited: float) -> dict[str, Any]:
    return {"seconds": 1.0, "computing": computing, "idle": idle, "disk": disk, "waited": waited}


def found(rows: list[dict[str, Any]], weights: list[float] | None = None, *, windows: int = 1) -> list[str]:
    window = SlowWindow(1.5, 10.0, {"dp": len(rows)})
    said = [window.add(rows, weights or [1.0] * len(rows), 2) for _ in range(10 * windows)]
    assert not any(said[:9])
    return [finding.words for one in said for finding in one]


def test_the_slow_rank_is_named_with_what_it_does() -> None:
    assert found([row(0.3, dp=0.7), row(0.9, dp=0.1), row(0.3, dp=0.7)]) == [
        "rank 1 is slow: computes 3.0 times as long as others, over 20 steps"
    ]
    reads = [row(0.3, 0.1, dp=0.6), row(0.3, 0.1, dp=0.6), row(0.3, 0.6, dp=0.1)]
    assert found(reads) == [
        "rank 2 is slow: is between steps (data, logging, saving) 6.0 times as long as others, over 20 steps"
    ]
    assert found([row(0.30, dp=0.7), row(0.40, dp=0.6), row(0.3, dp=0.7)]) == []


def test_what_is_slow_on_all_ranks_names_none() -> None:
    assert found([row(0.1, idle=0.8, dp=0.1)] * 4, windows=3) == []
    assert found([row(0.1, idle=0.8, dp=0.1), row(0.1, idle=0.75, dp=0.15)], windows=3) == []


def test_a_slow_disk_is_named_and_once_what_it_takes_of_a_step() -> None:
    mostly = "rank 1 waits for its disk 70% of a step (0.35 of 0.5 s): shardwise bench disk FOLDER measures what that"
    rows = [row(0.3, dp=0.7), row(0.3, disk=0.7)]
    assert found(rows, windows=2) == [
        "rank 1 is slow: waits for its disk, which others hardly do, over 20 steps",
        f"{mostly} disk can do",
        "rank 1 is slow: waits for its disk, which others hardly do, over 20 steps",
    ]
    assert found([row(0.3, disk=0.1, dp=0.6), row(0.3, disk=0.4, dp=0.3)]) == [
        "rank 1 is slow: waits for its disk 4.0 times as long as others, over 20 steps"
    ]
    alike = [row(0.25, disk=0.65, dp=0.1), row(0.25, disk=0.7, dp=0.05)]
    assert found(alike) == [f"{mostly} disk can do"]
    assert [one.words for one in judge([each | {"waiting": 0.1} for each in alike], {"dp": 2})] == [
        "waits 65% of a step for its disk",
        "waits 70% of a step for its disk",
    ]


def test_more_samples_may_take_longer() -> None:
    rows = [row(0.9, dp=0.1), row(0.6, dp=0.4), row(0.6, dp=0.4)]
    assert found(rows, [3 * 3 / 7, 2 * 3 / 7, 2 * 3 / 7]) == []
    assert found([row(0.9), row(0.5), row(0.5)], [1.0, 1.0, 1.0]) != []
    assert found([row(0.6), row(0.6), row(0.1)], [1.5, 1.5, 0.0]) == []


def test_slow_links_are_known_by_how_they_were() -> None:
    window = SlowWindow(1.5, 4.0, {"node": 2, "local": 2})
    said: list[str] = []
    for between in (0.1, 0.1, 0.5):
        for _ in range(4):
            rows = [row(0.4, local=0.05, node=between) for _ in range(4)]
            said += [finding.words for finding in window.add(rows, [1.0] * 4, 1)]
    assert said == ["messages along node take 500 ms of a step, 5.0 times as long as before"]


def test_another_number_of_ranks_begins_another_window() -> None:
    window = SlowWindow(1.5, 3.0, {"dp": 3})
    assert window.add([row(0.1), row(0.9), row(0.1)], [1.0] * 3, 1) == []
    assert window.add([row(0.1), row(0.1)], [1.0] * 2, 1) == []
    assert window.add([row(0.1), row(0.1)], [1.0] * 2, 1) == []
    assert window.add([row(0.1), row(0.1)], [1.0] * 2, 1) == []


class Left:
    """A membership that only notes that its rank asks to leave."""

    folder = None
    num_engines, has_several = 0, False

    def __init__(self, least: int) -> None:
        self.num_asked, self.least = 0, least

    def leave(self, *, must_go: bool = False) -> None:
        assert not must_go
        self.num_asked += 1

    def needs_all(self) -> None: ...

    def gives_up(self, when: str = "") -> None: ...

    def needs_ranks(self, least: int) -> None: ...

    def end(self, error: BaseException | None) -> None: ...


class Time:
    """The time of one rank, which passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.parametrize(("leave", "least"), [(False, 1), (True, 2), (True, 3)])
def test_a_running_job_names_it_and_may_leave_it_out(leave: bool, least: int, caplog: pytest.LogCaptureFixture) -> None:
    """It stays where the job needs every rank."""
    models = [nn.Linear(4, 4) for _ in range(3)]
    members = [Left(least) for _ in range(3)]
    plan = {"preset": "ddp", "survive": "checkpoint", "slow": {"factor": 3.0, "seconds": 0.2, "leave": leave}}

    def rank(world: sw.World) -> None:
        world.membership = members[world.rank]  # type: ignore[assignment]
        now = Time()
        clock = world.journal.clock = StepClock(now)
        mine = models[world.rank]
        with sw.shard(mine, plan, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), world=world) as engine:
            for _ in range(5):
                loss = engine(torch.ones(2, 4)).sum()
                now.seconds += 0.01
                engine.backward(loss)
                engine.step()
                now.seconds += 0.1
                if world.rank != 1:
                    clock.wait("dp", 0.1)
                engine.log({"loss": loss})
            world.membership = None

    with caplog.at_level(logging.WARNING, logger="shardwise"):
        run_ranks(3, rank)
    # On a busy machine the watchdog may name a rank that others wait for, too: by real time.
    said = [record.getMessage() for record in caplog.records if record.module != "watchdog"]
    assert said
    assert all("rank 1 is slow: is between steps (data, logging, saving)" in one for one in said)
    assert said[0].endswith("; it is left out") == (leave and least < 3)
    assert said[0].endswith("; it stays, because the job needs 3 ranks (--elastic)") == (least == 3)
    assert [member.num_asked > 0 for member in members] == [False, leave and least < 3, False]
