"""The simulated job: where its seconds go, against what can be computed by hand, and against published runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.fit import simulate as simulated
from shardwise.fit.failure_rates import Cause, FailureRates, failure_rates, known_rates, ranks_that_end
from shardwise.fit.simulate import (
    Failure,
    Job,
    Outcome,
    Recovery,
    SlowHosts,
    best_interval,
    daly_interval,
    replay,
    simulate,
)
from tests.thorough import sampled, thorough_only

RANK, HOST = Cause("rank", 0.0), Cause("host", 0.0, "host", "silence")
JOB = Job(
    world_size=16,
    ranks_per_host=4,
    step_seconds=10,
    seconds=1000,
    checkpoint_interval_seconds=100,
    checkpoint_stall_seconds=1,
    checkpoint_write_seconds=5,
    load_seconds=3,
    restart_seconds=50,
    exit_seconds=2,
    silence_seconds=15,
    regroup_seconds=4,
    join_seconds=25,
    join_pause_seconds=4,
)
LLAMA = Job(16384, 8, 5.0, 54 * 86400, checkpoint_stall_seconds=1, checkpoint_write_seconds=10, load_seconds=60)


def adds_up(outcome: Outcome) -> bool:
    return math.isclose(outcome.useful_seconds + sum(outcome.losses.values()), outcome.seconds, rel_tol=1e-9)


def test_a_job_without_failures_loses_its_checkpoints_alone() -> None:
    found = replay(JOB, [])
    # every 100 s, at the end of a step, which 1 s of the ones before delays
    assert found.losses["checkpoints"] == found.num_checkpoints == 9
    assert found.num_steps == 99
    assert found.useful_seconds == pytest.approx(991)
    assert adds_up(found)


def test_a_restart_repeats_the_steps_since_the_last_whole_checkpoint() -> None:
    found = replay(JOB, [Failure(325.0, RANK)])
    # saved at 100, 201 (due at 200) and 302 (due at 301); at 325 two steps and a part of the third are lost
    assert found.losses["finding"] == 2
    assert found.losses["restarting"] == 53
    assert found.losses["repeated"] == pytest.approx(325 - 303)
    assert found.num_restarts == 1
    assert found.by_cause == {"rank": pytest.approx(22 + 2 + 53)}
    assert adds_up(found)


def test_a_checkpoint_counts_when_it_is_whole() -> None:
    found = replay(JOB, [Failure(305.0, RANK)])  # that of 302 is whole at 308
    assert found.losses["repeated"] == pytest.approx(305 - 202 - 1)
    assert adds_up(found)


def test_survivors_repeat_the_step_and_a_rank_joins() -> None:
    found = replay(replace(JOB, recovery="buddy"), [Failure(326.0, RANK)])
    # 3 s of a step are void, then its forward of 10/3 s again; so it is when the replacement joins
    assert found.losses["regrouping"] == 8
    assert found.losses["void"] == pytest.approx(3 + 2 * 10 / 3)
    assert found.losses["repeated"] == found.losses["restarting"] == 0
    assert found.fewest_ranks == 15
    # steps of 16 ranks' batch by 15, from the end of the pause to the end of the step in which it is ready
    assert found.losses["fewer ranks"] == pytest.approx(2 * 10 / 15)
    assert (found.num_restarts, found.num_survived) == (0, 1)
    assert adds_up(found)


def test_of_a_single_group_as_many_train_as_form_a_mesh() -> None:
    """Of eight ranks seven are left, of which four train until the next has come."""
    group = replace(JOB, world_size=8, ranks_per_host=8, recovery="host", numbers=(8, 4, 2, 1))
    found = replay(group, [Failure(326.0, RANK)])
    assert (found.num_restarts, found.fewest_ranks) == (0, 7)
    # the replacement is ready after 25 s, in a step of 20 s, the first after the pause
    assert found.losses["fewer ranks"] == pytest.approx(20 - 10)
    assert adds_up(found)
    with pytest.raises(ConfigError, match="numbers is"):
        replace(group, numbers=(8, 4))
    assert replace(group, numbers=(8, 4), least_ranks=4).num_training(7) == 4


def test_a_step_of_fewer_ranks_takes_as_long_as_is_foreseen() -> None:
    group = replace(JOB, world_size=8, ranks_per_host=8, recovery="host", numbers=(8, 4, 1), seconds_with={4: 14.0})
    found = replay(group, [Failure(326.0, RANK)])
    # of four ranks one step ends before the replacement is ready, and one with it
    assert found.losses["fewer ranks"] == pytest.approx(2 * (14 - 10))
    assert adds_up(found)
    assert group.seconds_of_step(3) == 80.0, "in proportion, where it is not foreseen"
    assert replace(group, seconds_with={1: 4.0}).seconds_of_step(3) == 10.0, "none counts for more than a useful one"


@pytest.mark.parametrize(
    ("recovery", "causes", "num_restarts"),
    [
        ("host", (RANK,), 0),
        ("host", (HOST,), 1),
        ("buddy", (HOST,), 0),
        ("copies", (HOST,), 0),
        ("copies", (Cause("software", 0.0, "job"),), 1),
    ],
)
def test_what_exists_nowhere_else_is_read_from_the_checkpoint(
    recovery: Recovery, causes: tuple[Cause, ...], num_restarts: int
) -> None:
    found = replay(
        replace(JOB, recovery=recovery), [Failure(326.0 + place, cause) for place, cause in enumerate(causes)]
    )
    assert found.num_restarts == num_restarts
    assert adds_up(found)


def test_a_host_and_its_buddy_at_once_are_a_restart() -> None:
    job = replace(JOB, recovery="buddy")
    assert replay(job, [Failure(326.0, HOST, 0.0), Failure(330.0, HOST, 0.3)]).num_restarts == 1
    assert replay(job, [Failure(326.0, HOST, 0.0), Failure(330.0, HOST, 0.6)]).num_restarts == 0
    assert replay(job, [Failure(326.0, HOST, 0.0), Failure(500.0, HOST, 0.3)]).num_restarts == 0


def test_without_a_spare_they_train_on_or_wait() -> None:
    broken = replace(HOST, repair_hours=0.1)
    some = replay(replace(JOB, recovery="buddy", spare_ranks=0), [Failure(300.0, broken)])
    assert some.fewest_ranks == 12
    assert some.losses["waiting for ranks"] == 0
    assert some.losses["fewer ranks"] > 0
    all_or_none = replace(JOB, spare_ranks=0, least_ranks=16)
    waiting = replay(all_or_none, [Failure(300.0, broken)])
    assert waiting.losses["waiting for ranks"] == pytest.approx(360 - 15)
    enough = replay(replace(all_or_none, spare_ranks=4), [Failure(300.0, broken)])
    assert enough.losses["waiting for ranks"] == 0
    too_few = replay(replace(all_or_none, recovery="buddy"), [Failure(300.0, broken)])
    assert too_few.losses["waiting for ranks"] > 300
    assert too_few.num_checkpoints > 3  # also after the wait
    assert all(map(adds_up, (some, waiting, enough, too_few)))


def test_a_failure_while_ranks_start_begins_anew() -> None:
    once = replay(JOB, [Failure(325.0, RANK)])
    twice = replay(JOB, [Failure(325.0, RANK), Failure(365.0, RANK)])
    assert twice.losses["restarting"] + twice.losses["finding"] == pytest.approx(40 + 55)
    assert twice.losses["repeated"] == once.losses["repeated"]
    surviving = replace(JOB, recovery="copies")
    starting = replay(surviving, [Failure(325.0, Cause("software", 0.0, "job")), Failure(365.0, RANK)])
    assert starting.num_restarts == 2


def test_a_planned_stop_repeats_nothing() -> None:
    found = replay(JOB, [Failure(325.0, Cause("maintenance", 0.0, "job", planned=True))])
    assert found.losses["planned stops"] == 6 + 53
    assert found.losses["repeated"] == found.losses["void"] == 0
    assert adds_up(found)


def test_slow_hosts_slow_all_steps() -> None:
    job = replace(JOB, slow=SlowHosts(1.0, 1.5, 0.1), checkpoint_interval_seconds=1000)
    found = replay(job, [], [200.0, 300.0])  # the second ends at 660
    assert found.losses["slow hosts"] == pytest.approx(460 / 3)
    assert found.useful_seconds == pytest.approx(1000 - 460 / 3)


def test_one_seed_one_outcome_and_the_same_failures_whatever_is_done_about_them() -> None:
    rates = ranks_that_end(50)
    job = replace(JOB, seconds=86400)
    assert simulate(job, rates, 7) == simulate(job, rates, 7)
    assert simulate(job, rates, 7) != simulate(job, rates, 8)
    other = simulate(replace(job, recovery="copies", join_seconds=0), rates, 7)
    assert other.num_interruptions == simulate(job, rates, 7).num_interruptions
    assert all(
        adds_up(simulate(replace(job, recovery=how), rates, 3)) for how in ("restart", "host", "buddy", "copies")
    )


@sampled
@pytest.mark.parametrize("mean_hours", [1.0, 8.0])
def test_the_best_interval_is_youngs_and_dalys(mean_hours: float) -> None:
    """Where a checkpoint stops the job and a restart costs as much as a checkpoint, theirs is the optimum, and goodput
    is what Daly's model of the run time says."""
    job = Job(1, 1, 1.0, 200 * mean_hours * 3600, restart_seconds=30, exit_seconds=0, checkpoint_stall_seconds=30)
    rates = ranks_that_end(mean_hours)
    daly, mean = daly_interval(job, rates), mean_hours * 3600
    assert daly == pytest.approx(math.sqrt(2 * 30 * mean), rel=0.15)
    best, *rest = best_interval(job, rates, range(2))
    assert daly / 1.5 < best.seconds < 1.5 * daly
    worst = min(rest, key=lambda one: one.goodput)
    assert worst.goodput < best.goodput
    step = best.seconds + 30
    expected = best.seconds / (mean * math.exp(30 / mean) * (math.exp(step / mean) - 1))
    assert best.goodput == pytest.approx(expected, abs=0.012)


def events_of(job: Job, rates: FailureRates, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, int]:
    """The outcome, and how many events have made it."""
    pushed: list[float] = []
    push = simulated._Run._push

    def counting(run: simulated._Run, at: float, act: Callable[[], None]) -> None:
        pushed.append(at)
        push(run, at, act)

    with monkeypatch.context() as patch:
        patch.setattr(simulated._Run, "_push", counting)
        return simulate(job, rates, seed), len(pushed)


@pytest.mark.parametrize("stall", [0.0, 1.0])
@pytest.mark.parametrize("interval", [1e-300, 1.0, 2.5, 60.0])
def test_checkpoints_between_which_nothing_happens_are_no_events(
    stall: float, interval: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are a few for each failure, and the outcome is that of a job whose every checkpoint is one."""
    rates = ranks_that_end(40)
    job = Job(
        64,
        8,
        1.0,
        20_000.0,
        checkpoint_interval_seconds=interval,
        checkpoint_stall_seconds=stall,
        checkpoint_write_seconds=2 * stall,
        slow=SlowHosts(0.1, 1.5, 0.25),
    )
    found, num_events = events_of(job, rates, 5, monkeypatch)
    num_others = found.num_interruptions + 2 * sum(1 for _ in simulated._slow_starts(job, 5))
    assert found.num_restarts > 3
    assert found.losses["slow hosts"] > 0
    assert num_events < 13 * (num_others + 1)
    monkeypatch.setattr(simulated._Run, "_repeat_intervals", lambda _: None)
    each, num_all = events_of(job, rates, 5, monkeypatch)
    assert num_all > 2 * found.num_checkpoints
    assert found.losses == pytest.approx(each.losses)
    assert found.useful_seconds == pytest.approx(each.useful_seconds)
    assert (found.num_steps, found.num_checkpoints) == (each.num_steps, each.num_checkpoints)


@pytest.mark.parametrize(
    ("step", "stall", "seconds", "steps_between", "num_steps"),
    [(0.1, 0.1, 200.0, 7, 1751), (0.2, 0.2, 500.0, 10, 2273), (0.3, 0.1, 500.0, 7, 1591), (1.1, 0.1, 1000.0, 10, 901)],
)
def test_a_step_that_ends_with_the_job_counts_however_it_is_rounded(
    step: float, stall: float, seconds: float, steps_between: int, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are sums of many steps in one way, and products in the other."""
    interval = step * steps_between + stall
    job = Job(64, 8, step, seconds, checkpoint_interval_seconds=interval, checkpoint_stall_seconds=stall)
    found = replay(job, [])
    assert found.num_steps == num_steps
    assert found.useful_seconds + sum(found.losses.values()) == pytest.approx(seconds)
    monkeypatch.setattr(simulated._Run, "_repeat_intervals", lambda _: None)
    assert replay(job, []).num_steps == num_steps


def test_weeks_of_checkpoints_that_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is saved then. 54 days are 4.7 million of them, and some dozen failures."""
    rates = failure_rates("llama3-405b")
    job = Job(1024, 8, 1.0, 54 * 86400)
    assert daly_interval(job, rates) == job.step_seconds
    best = best_interval(job, rates, [0])[0]
    found, num_events = events_of(replace(job, checkpoint_interval_seconds=best.seconds), rates, 0, monkeypatch)
    assert best.seconds == job.step_seconds
    assert found.num_checkpoints > 4_000_000
    assert num_events < 20 * (found.num_interruptions + 1)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_llama_3_405b_trained_for_over_90_percent_of_the_time() -> None:
    """54 days on 16,384 GPUs, 466 interruptions of which 419 were unexpected. How long a restart took is not published;
    with 10 minutes all but a tenth is useful, and with 5 more."""
    rates = failure_rates("llama3-405b")
    unexpected = [cause for cause in rates.causes if not cause.planned]
    assert sum(cause.per_rank_hour for cause in rates.causes) * 16384 * 54 * 24 == pytest.approx(466)
    assert sum(cause.per_rank_hour for cause in unexpected) * 16384 * 54 * 24 == pytest.approx(419)
    goodput = {}
    for minutes in (5, 10):
        job = replace(LLAMA, restart_seconds=60 * minutes)
        job = replace(job, checkpoint_interval_seconds=daly_interval(job, rates))
        runs = [simulate(job, rates, seed) for seed in range(2)]
        assert fmean(one.num_interruptions for one in runs) == pytest.approx(466, rel=0.1)
        goodput[minutes] = fmean(one.goodput for one in runs)
    assert 0.90 < goodput[10] < 0.93
    assert 0.94 < goodput[5] < 0.97


@thorough_only("slow; smaller tests beside it cover the same code")
def test_100_000_gpus_that_restart_or_lose_a_replica() -> None:
    """FT-HSDP (arXiv:2602.00277): a failure every 18 minutes, 10 minutes until all train again: 44 % of the time are
    useful; if only the replica leaves, the others stand for 3 minutes: 80 %."""
    rates = ranks_that_end(100_000 * 18 / 60)
    job = Job(
        100_000, 8, 10.0, 20 * 86400, restart_seconds=600, checkpoint_stall_seconds=5, checkpoint_write_seconds=20
    )
    best = best_interval(job, rates, [0])[0]
    assert best.goodput == pytest.approx(0.44, abs=0.08)
    alone = replace(job, recovery="copies", regroup_seconds=180, join_seconds=600, join_pause_seconds=0)
    alone = replace(alone, leave_together=4096, checkpoint_interval_seconds=3600)
    assert simulate(alone, rates, 0).goodput == pytest.approx(0.80, abs=0.03)


def test_rates_of_files(tmp_path: Path) -> None:
    assert "llama3-405b" in known_rates()
    file = tmp_path / "rates.yaml"
    file.write_text("gpu_hours: 1000\ncauses:\n  fan: {events: 2, takes: host, repair_hours: 1}\n")
    assert failure_rates(str(file)) == FailureRates((Cause("fan", 0.002, "host", "exit", 1.0),), str(file))
    for text, said in (
        ("gpu_hours: 0\ncauses: {fan: {events: 2}}", "gpu_hours is 0; give a number of more than 0"),
        ("gpu_hours: 1\ncauses: {fan: {events: -2}}", "fan: events is -2; give a number of at least 0"),
        ("gpu_hours: 1\ncauses: {fan: {events: 1, takes: rack}}", "takes is 'rack'; write one of rank, host, job"),
        ("gpu_hours: 1\ncauses: {fan: {event: 1}}", "write {events: N}"),
        ("gpu_hours: 1\nreasons: {}\ncauses: {}", "does not know 'reasons'"),
        ("gpu_hours: 1", "needs causes"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said.replace("{", r"\{")):
            failure_rates(str(file))
    with pytest.raises(ConfigError, match="Did you mean 'llama3-405b'"):
        failure_rates("llama-405b")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "goodput.svg"
    words = ["simulate", "zero3", "--world", "64", "--days", "2", "--step-seconds", "2", "--rank-hours", "200"]
    words += ["--checkpoint-bytes", "100G", "--storage", "10G", "--checkpoint-stall", "1"]
    assert main([*words, "--picture", str(picture), "--runs", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "all ranks restart from the last checkpoint, because parameters are on an accelerator" in said
    assert "costs least (Young and Daly: " in said
    assert picture.read_text().startswith("<svg")
    assert main([*words, "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["recovery"] == "buddy"
    assert found["restarts"] == 0
    assert found["goodput"] + sum(found["losses"].values()) / found["job"]["seconds"] == pytest.approx(1)
    assert found["goodput"] == pytest.approx(fmean(found["goodput_by_run"]))
    assert main([*words, "--recovery", "buddy", "--per-host", "64"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "from images on their host; if a host is lost, all ranks restart" in said, "there is no other"
    split = [*words, "--device", "cpu", "--set", "mesh={dp: 32, tp: 2}", "--json"]
    assert main(split) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"]["recovery"] != "restart"
    assert told["job"]["leave_together"] == 2
    split[-2] = "mesh={tp: 64}"
    assert main(split) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"]["recovery"] != "restart"
    assert told["job"]["numbers"] == [64, 32, 16, 8, 4, 2, 1]
    split[-2] = "mesh={pp: 2, tp: 32}"
    assert main([*split, "--set", "accumulate=2"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"]["numbers"] == [64, 32, 16, 8, 4, 2, 1]
    split[-2] = "powersgd={rank: 4}"
    split[1] = "ddp"
    assert main(split) == 0
    assert json.loads(capsys.readouterr().out)["job"]["recovery"] == "copies"


def test_the_command_says_that_checkpoints_cost_nothing_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "zero3", "--world", "64", "--days", "2", "--step-seconds", "2", "--rank-hours", "200"]
    assumed = "Checkpoints are assumed to cost nothing"
    assert main(words) == 0
    assert assumed in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--checkpoint-stall", "1"]) == 0
    assert assumed not in " ".join(capsys.readouterr().out.split())


MODEL = """
import torch
from torch import nn
def build():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
def batch():
    return torch.ones(32, 64)
"""


def test_the_step_of_a_model_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `explain --time` does it, and a checkpoint has 12 bytes for each parameter with Adam."""
    (tmp_path / "tiny.py").write_text(MODEL)
    of_model = [
        "--model",
        f"{tmp_path}/tiny.py:build",
        "--batch",
        f"{tmp_path}/tiny.py:batch",
        "--hardware",
        "h100-sxm",
    ]
    same = ["zero3", "--world", "16", "--per-host", "8", "--optimizer", "adamw", *of_model, "--json"]
    assert main(["explain", "--time", *same]) == 0
    predicted = json.loads(capsys.readouterr().out)["time"]["step_seconds"]
    assert main(["simulate", "--days", "0.01", "--storage", "1M", *same]) == 0
    job = json.loads(capsys.readouterr().out)["job"]
    assert job["step_seconds"] == predicted > 0
    num_params = 2 * 64 * 256 + 256 + 64
    assert job["checkpoint_write_seconds"] == pytest.approx(12 * num_params / 2**20)
    assert main(["simulate", "--days", "0.01", "--storage", "1M", "--device", "cpu", *same]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["recovery"] == "buddy"
    signs = ["onebit-adam" if word == "adamw" else "ddp" if word == "zero3" else word for word in same]
    assert main(["simulate", "--days", "0.01", "--storage", "1M", "--device", "cpu", *signs]) == 0
    assert json.loads(capsys.readouterr().out)["job"]["recovery"] == "copies"
    wrong = ["adamx" if word == "adamw" else word for word in same]
    assert main(["simulate", "--days", "0.01", *wrong]) == 2
    assert "Did you mean 'adam'?" in capsys.readouterr().err
    assert main(["simulate", "--days", "0.01", "--step-seconds", "1", *same]) == 2
    assert "Give one of them." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hardware", "h100-sxm"], "--hardware is for --model"),
        (["--checkpoint-bytes", "1T"], "Give both, or neither."),
        (["--failures", "opt-175b", "--rank-hours", "3"], "Give one of them."),
        (["--slow-hosts", "3"], "write events for each host and hour"),
        (["--least", "100"], "--least is 100, but there are 8 ranks."),
        (["--slow-hosts", "1:0.5:1"], "--slow-hosts is '1:0.5:1'; write events"),
        (["--slow-hosts", "1:inf:1"], "all of them finite"),
        (["--slow-hosts", "1:2:inf"], "all of them finite"),
        (["--step-seconds", "1e9"], "none would end. Give more --days."),
        (["--runs", "0"], "--runs is 0"),
        (["--world", "1000000000"], "--world is 1000000000; give at most 2000000"),
        (["--runs", "1000000000"], "--runs is 1000000000; give 1 to 10000"),
        (["--days", "1e18"], "so there would be 8.64e+22 steps"),
        (["--days", "nan"], "--days is nan; give more than 0, and a finite number."),
        (["--days", "-1"], "--days is -1; give more than 0"),
        (["--step-seconds", "0"], "--step-seconds is 0; give more than 0"),
        (["--checkpoint-stall", "-1"], "--checkpoint-stall is -1; give 0 or more"),
        (["--join-seconds", "inf"], "--join-seconds is inf; give 0 or more, and a finite number"),
        (["--spares", "-1"], "--spares is -1; give 0 or more"),
        (["--checkpoint-every", "nan"], "--checkpoint-every is nan"),
        (["--step-seconds", "1e-300"], "step_seconds is 1e-300, so there would be"),
        (["--checkpoint-every", "1e-300"], "--checkpoint-every is 1e-300 s, but a step takes 1 s"),
        (["--rank-hours", "1e-300"], "failures are to be expected"),
        (["--slow-hosts", "1e18:2:3"], "hosts that become slow are to be expected"),
        (["--picture", "a.png"], "pictures are .svg files"),
        (["--checkpoint-every", "often"], "give seconds, or auto"),
    ],
)
def test_what_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ddp", "--world", "8", "--days", "1", "--step-seconds", "1", *words]) == 2
    assert said in capsys.readouterr().err
