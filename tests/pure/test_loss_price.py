"""What the loss of a rank, a host or the launcher costs, by the plan, on simulated jobs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import explain
from shardwise.cli.explanation import example_units
from shardwise.errors import ConfigError
from shardwise.fit.loss_price import LAUNCHER_LOST, NO_COPIES, NO_GROUP, ONE_HOST, LossPrice, Rates, loss_prices
from shardwise.fit.simulate import Job
from shardwise.plan import Plan
from shardwise.plan.placement import mesh_for, table_for

MIB = 2**20
REGROUPED = 0.2
"""Of four example units of 2**20 parameters with two states each: 48 MiB of state in all."""


def prices(
    per_host: int = 4, why: str = "", rates: Rates | None = None, world: int = 4, **plan: Any
) -> dict[str, LossPrice]:
    checked = Plan.model_validate(plan)
    mesh = mesh_for(checked, world, per_host)
    flats = [flat for unit in example_units(table_for(checked, mesh), mesh, checked) for flat in unit.flats]
    found = loss_prices(mesh, flats, 2, per_host=per_host, survive=checked.survive, why_restarted=why, rates=rates)
    return {one.what: one for one in found}


def test_the_others_repeat_a_step_and_read_their_new_range() -> None:
    one = prices(preset="zero3")["rank"]
    assert (one.num_lost, one.why_restarted, one.num_steps) == (1, "", 1.0)
    assert one.read_bytes == 48 * MIB // 3
    assert one.seconds == REGROUPED
    assert prices(per_host=2, preset="zero3")["rank"].seconds == pytest.approx(0.4), "0.42 to 0.72 s was measured"
    assert str(one) == (
        "one rank: the others stand for 200 ms, and 1 step again; each reads up to 16.0 MiB from memory; 1 rank is "
        "missing until as many join"
    )


def test_copies_of_everything_are_read_nowhere() -> None:
    one = prices(preset="ddp")["rank"]
    assert (one.read_bytes, one.why_restarted) == (0, "")
    assert "nothing is read" in str(one)


def test_memory_takes_its_time() -> None:
    one = prices(preset="zero3", rates=Rates(memory=8 * MIB))["rank"]
    assert one.seconds == pytest.approx(REGROUPED + 2)


def test_a_disk_takes_its_time() -> None:
    one = prices(preset="infinity", disk="/scratch", rates=Rates(disk=8 * MIB))["rank"]
    assert (one.read_bytes, one.disk_bytes) == (0, 48 * MIB // 3)
    assert one.seconds == pytest.approx(REGROUPED + 2)
    assert "; each reads up to 16.0 MiB from a disk; " in str(one)


def test_a_replica_group_leaves_together() -> None:
    one = prices(world=6, per_host=6, preset="zero1", mesh={"dp": 3, "tp": 2})["rank"]
    assert (one.num_lost, one.why_restarted) == (2, "")
    assert "2 ranks are missing" in str(one)


@pytest.mark.parametrize(
    ("plan", "per_host", "num_lost", "why"),
    [
        ({"preset": "zero3"}, 4, 4, ONE_HOST),
        ({"preset": "zero3"}, 2, 2, ""),
        ({"preset": "zero3", "survive": "host"}, 2, 4, NO_COPIES),
        ({"preset": "hsdp", "mesh": {"node": 2, "local": 2}, "survive": "host"}, 2, 2, ""),
        ({"preset": "ddp", "survive": "host"}, 2, 2, ""),
        ({"preset": "zero1", "mesh": {"dp": 2, "tp": 2}}, 2, 2, ""),
        ({"preset": "zero1", "mesh": {"tp": 2, "dp": 2}}, 2, 4, NO_GROUP),
    ],
)
def test_a_host(plan: dict[str, Any], per_host: int, num_lost: int, why: str) -> None:
    one = prices(per_host, **plan)["host"]
    assert (one.num_lost, one.why_restarted) == (num_lost, why)
    assert one.seconds >= Job.silence_seconds


def test_a_restart_makes_half_the_steps_between_checkpoints_again() -> None:
    rates = Rates(step_seconds=2.0, checkpoint_every=1800)
    found = prices(2, why="there is no optimizer", rates=rates, preset="zero3")
    for one, seconds in ((found["rank"], Job.exit_seconds), (found["launcher"], 0.0)):
        assert (one.num_lost, one.num_steps, one.read_bytes) == (4, 450, 12 * MIB)
        assert one.seconds == seconds + Job.restart_seconds
    assert str(found["launcher"]) == (
        f"the launcher: all ranks restart, because {LAUNCHER_LOST}: 5m00s, and 450 steps again (15m00s); each reads "
        f"12.0 MiB of the checkpoint"
    )
    unknown = prices(2, preset="zero3")["launcher"]
    assert "the steps since the last checkpoint (--checkpoint-every says how many)" in str(unknown)


def test_a_launcher_of_one_host_costs_nothing() -> None:
    assert str(prices(preset="zero3")["launcher"]) == (
        "the launcher: the ranks train on, and another process takes over"
    )


def explained(*words: str) -> int:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return explain.run(parser.parse_args(words))


def test_explain_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explained("zero3", "--world", "4", "--per-host", "2", "--json")
    rank, host, launcher = json.loads(capsys.readouterr().out)["losses"]
    assert (rank["read_bytes"], host["num_lost"], launcher["why_restarted"]) == (16 * MIB, 2, LAUNCHER_LOST)
    explained("zero3", "--world", "4", "--per-host", "2")
    shown = " ".join(capsys.readouterr().out.split())
    assert "what a loss costs an elastic job one rank: the others stand for 400 ms, and 1 step again" in shown
    explained("infinity", "--world", "4", "--set", f"disk={tmp_path}")
    shown = " ".join(capsys.readouterr().out.split())
    assert "one rank: the others stand for 200 ms, and 1 step again; each reads up to 16.0 MiB from a disk;" in shown
    explained("zero3", "--world", "1")
    assert "what a loss costs" not in capsys.readouterr().out
    explained("ddp", "--world", "4", "--optimizer", "onebit-adam")
    shown = " ".join(capsys.readouterr().out.split())
    assert "(one bit per element) begins at zero when ranks leave or join." in shown
    assert "what a loss costs" in shown
    explained("ddp", "--world", "4", "--set", "powersgd.rank=2", "--json")
    shown = json.loads(capsys.readouterr().out)
    assert "(powersgd) begins at zero" in shown["begins_anew"]
    assert len(shown["losses"]) == 3
    explained("zero3", "--world", "4", "--json")
    assert "begins_anew" not in json.loads(capsys.readouterr().out)
    with pytest.raises(ConfigError, match="--checkpoint-every takes seconds, more than 0, and --time"):
        explained("zero3", "--world", "4", "--checkpoint-every", "60")
