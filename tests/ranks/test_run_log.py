"""What an engine reports about its run: the record, which ranks wait, what goes wrong, and a profile of some steps."""

from __future__ import annotations

import copy
import csv
import json
import logging
import math
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.elastic.rebuild import take_down
from shardwise.errors import ConfigError, FaultError
from shardwise.observe import Record, read_record
from shardwise.observe.html_report import html_report
from shardwise.observe.run_notes import read_notes
from shardwise.observe.run_view import read_run
from shardwise.observe.trackers import CSV
from shardwise.testing import run_ranks
from tests import inside
from tests.patience import wait_until
from tests.thorough import sampled

Tensor = torch.Tensor


def models(num: int) -> list[nn.Module]:
    """Equal models."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 1)) for _ in range(num)]
    for model in made:
        model.load_state_dict(made[0].state_dict())
    return made


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def engine_of(model: nn.Module, world: sw.World, run: Path, **plan: Any) -> sw.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return sw.shard(model, {"run": str(run), **plan}, optimizer=optimizer, world=world)


def record(run: Path) -> Record:
    return read_record(run / "record.jsonl")


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in record(run).lines if line["kind"] == kind]


def takes_time(world: sw.World) -> Callable[[float], None]:
    """A function that lets so many seconds pass on the clock of this rank's steps."""
    clock, passed = world.journal.clock, [0.0]
    clock.now = lambda: time.perf_counter() + sum(passed)
    return passed.append


def test_a_run_is_written_down_goes_on_and_is_the_same_as_without(tmp_path: Path) -> None:
    """One of three ranks computes longer, and one waits for its data: means, throughput, times and memory are recorded.
    A second run continues from a checkpoint, with another size and plan."""
    run, kept = tmp_path / "run", tmp_path / "kept"
    first, again = models(3), models(2)
    returned: list[float] = []

    def train(world: sw.World) -> None:
        take = takes_time(world)

        def loss_fn(output: Tensor) -> Tensor:
            take(0.04 * (world.rank == 2))
            return loss_of(output)

        with engine_of(first[world.rank], world, run, preset="zero3", clip_grad_norm=1.0) as engine:
            for step in range(1, 6):
                take(0.02 * (world.rank == 1))
                loss = engine.train_step(batch(step, world.rank), loss_fn=loss_fn)
                means = engine.log({"loss": loss, "rank": world.rank}, tokens=100, samples=4)
                if world.rank == 0:
                    returned.append(means["loss"])
            engine.log({"loss": 0.5}, kind="validation")
            engine.save(kept)

    def go_on(world: sw.World) -> None:
        with engine_of(again[world.rank], world, run, preset="zero1") as engine:
            engine.resume(kept)
            engine.train_step(batch(6, world.rank), loss_fn=loss_of)
            engine.log({"loss": 1.0}, tokens=10)
            engine.reshard({"preset": "zero3"})
            engine.train_step(batch(7, world.rank), loss_fn=loss_of)
            engine.log({"loss": 1.0}, tokens=10)

    run_ranks(3, train)
    steps = lines(run, "step")
    for told, line, (loss, norm) in zip(returned, steps, plain_losses_and_norms(5, num_ranks=3), strict=True):
        assert told == pytest.approx(loss, rel=1e-5)
        assert line["norm"] == pytest.approx(norm, rel=1e-4)
    assert [(line["step"], line["tokens"], line["rank"], line["lr"]) for line in steps] == [
        (step, 300 * step, 1.0, 0.1) for step in range(1, 6)
    ]
    assert all(line["tokens_per_second"] == pytest.approx(300 / line["seconds"], rel=1e-6) for line in steps)
    assert lines(run, "validation")[0]["loss"] == 0.5
    assert lines(run, "end")[0]["status"] == "ended"
    check_what_three_ranks_noted(run)

    run_ranks(2, go_on)
    assert [line["step"] for line in lines(run, "step")] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["tokens"] for line in lines(run, "step")][-2:] == [1520, 1540]
    assert [(line["step"], line["world_size"]) for line in lines(run, "resume")] == [(5, 2)]
    assert not lines(run, "step")[-1].get("rank")


def plain_losses_and_norms(num_steps: int, *, num_ranks: int) -> list[tuple[float, float]]:
    """By step, of one model that is given the batches of all ranks and clips to norm 1."""
    plain = models(1)[0]
    optimizer, found = torch.optim.SGD(plain.parameters(), lr=0.1), []
    for step in range(1, num_steps + 1):
        loss = loss_of(plain(torch.cat([batch(step, rank) for rank in range(num_ranks)])))
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), float(nn.utils.clip_grad_norm_(plain.parameters(), 1.0))))
        optimizer.step()
    return found


def check_what_three_ranks_noted(run: Path) -> None:
    """The times and memory of each, where rank 2 computes longer and rank 1 waits for its data; timeline, program."""
    ranks = lines(run, "ranks")[-1]["ranks"]
    assert ranks[2]["computing"] > 0.04
    assert ranks[1]["idle"] > 0.02
    assert ranks[0]["waited"]["dp"] > 0
    assert all(
        row["computing"] + row["idle"] + row["waiting"] == pytest.approx(row["seconds"], rel=1e-3) for row in ranks
    )
    memory = lines(run, "memory")[-1]["ranks"]
    assert len(memory) == 3
    assert memory[0]["promised"]["device"]["param"] == memory[0]["measured"]["device"]["param"] > 0
    trace = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace} == {0, 1, 2}
    assert "reduce_scatter" in (run / "program.txt").read_text()


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_grows_by_rows_and_columns_and_goes_on_where_the_run_does(tmp_path: Path) -> None:
    """Three steps and a validation on two ranks, with a checkpoint after two. One run resumes there at another size,
    and another starts anew."""
    run, kept, made = tmp_path / "run", tmp_path / "kept", models(5)
    plan: dict[str, Any] = {"preset": "zero3", "trackers": ["csv"]}

    def train(world: sw.World) -> None:
        with engine_of(made[world.rank], world, run, **plan) as engine:
            for step in range(1, 4):
                loss = engine.train_step(batch(step, world.rank), loss_fn=loss_of)
                engine.log({"loss": loss, "rank": world.rank}, samples=4)
                if step == 2:
                    engine.log({"loss": 0.5}, kind="validation")
                    engine.save(kept)

    def go_on(world: sw.World) -> None:
        with engine_of(made[2 + world.rank], world, run, **plan) as engine:
            engine.resume(kept)
            for step in (3, 4):
                engine.train_step(batch(step, world.rank), loss_fn=loss_of)
            engine.log({"loss": math.nan, "more": 7})

    def anew(world: sw.World) -> None:
        with engine_of(made[3], world, run, **plan) as engine:
            engine.train_step(batch(1, 0), loss_fn=loss_of)
            engine.train_step(batch(2, 0), loss_fn=loss_of)
            engine.log({"loss": 1.0})

    run_ranks(2, train)
    first = table(run / "metrics.csv")
    assert [(row["step"], row["rank"], row["validation/loss"]) for row in first] == [
        ("1", "0.5", ""), ("2", "0.5", ""), ("2", "", "0.5"), ("3", "0.5", ""),
    ]  # fmt: skip
    assert all(float(row["samples_per_second"]) > 0 for row in first if row["rank"])
    assert not (run / "record.jsonl").exists()
    run_ranks(1, go_on)
    second = table(run / "metrics.csv")
    assert [{**row, "more": ""} for row in second[:-1]] == [{**row, "more": ""} for row in first[:3]]
    assert (second[-1]["step"], second[-1]["loss"], second[-1]["more"], second[-1]["rank"]) == ("4", "nan", "7.0", "")
    run_ranks(1, anew)
    assert [(row["step"], row["loss"]) for row in table(run / "metrics.csv")] == [("2", "1.0")]
    assert not (run / "record.jsonl").exists()
    assert len(table(run / "earlier-1" / "metrics.csv")) == len(second)


def test_a_table_is_read_after_a_crash_and_that_of_others_is_left_alone(tmp_path: Path) -> None:
    def train(world: sw.World, path: Path, first: int) -> None:
        plan = {"trackers": [{"csv": {"file": str(path)}}]}
        with engine_of(nn.Linear(16, 1), world, tmp_path / "run", **plan) as engine:
            engine.num_steps = first - 1
            engine.train_step(batch(first, 0), loss_fn=loss_of)
            engine.log({"loss": 1.0, 'a "name", quoted': 2.0})

    path = tmp_path / "elsewhere" / "table.csv"
    run_ranks(1, lambda world: train(world, path, 1))
    with path.open("a") as file:
        file.write("2,0.5")  # its writer died here
    run_ranks(1, lambda world: train(world, path, 3))
    assert [(row["step"], row['a "name", quoted']) for row in table(path)] == [("1", "2.0"), ("3", "2.0")]
    path.write_text("epoch,accuracy\n1,0.9\n")
    with pytest.raises(ConfigError, match=r"table\.csv is not a table of this tracker.*Move it away"):
        run_ranks(1, lambda world: train(world, path, 1))
    assert path.read_text() == "epoch,accuracy\n1,0.9\n"
    with pytest.raises(ConfigError, match="csv does not take these options"):
        engine_of(models(1)[0], sw.World.join(environment={}), tmp_path, trackers=[{"csv": {"flie": "x"}}])


def test_a_new_run_that_logs_late_keeps_nothing_of_an_older_one(tmp_path: Path) -> None:
    """A new run drops the older record from its own first step on, though it logs later; a resumed run, from its
    checkpoint on, even if it took steps before."""
    made, run, kept = models(3), tmp_path / "run", tmp_path / "kept"

    def train(model: nn.Module, steps: range, every: int, resumed: bool = False) -> None:
        with engine_of(model, sw.World.join(environment={}), run) as engine:
            if resumed:
                engine.train_step(batch(0, 0), loss_fn=loss_of)
                engine.resume(kept)
            for step in steps:
                engine.train_step(batch(step, 0), loss_fn=loss_of)
                if step % every == 0:
                    engine.log({"loss": float(every)})
                if step == 4 and not resumed:
                    engine.save(kept)

    train(made[0], range(1, 4), 1)
    train(made[1], range(1, 7), 3)
    assert [(line["step"], line["loss"]) for line in lines(run, "step")] == [(3, 3.0), (6, 3.0)]
    assert not lines(run, "resume")
    train(made[2], range(5, 9), 2, resumed=True)
    assert [(line["step"], line["loss"]) for line in lines(run, "step")] == [(3, 3.0), (6, 2.0), (8, 2.0)]
    assert [line["step"] for line in lines(run, "resume")] == [4]


def test_what_a_loop_has_brought_together_is_written_as_it_is(tmp_path: Path) -> None:
    """Ranks log different values, and rank 0 writes some lines alone."""
    made = models(2)

    def train(world: sw.World) -> list[dict[str, float]]:
        said = []
        with engine_of(made[world.rank], world, tmp_path, trackers=["jsonl", "csv"]) as engine:
            for step in (1, 2):
                engine.train_step(batch(step, world.rank), loss_fn=loss_of)
                own = {"loss": 0.5 * step} if world.rank == 0 else {"other": 3.0}
                said.append(engine.log(own, tokens=10, mean=False))
                if world.rank == 0:
                    said.append(engine.log({"loss": 0.25}, kind="validation", mean=False))
                with pytest.raises(ConfigError, match="name is 'text'"):
                    engine.log({"name": "text"}, kind="validation", mean=False)
        return said

    first, second = run_ranks(2, train)
    assert first == [{"loss": 0.5}, {"loss": 0.25}, {"loss": 1.0}, {"loss": 0.25}]
    assert second == [{"other": 3.0}] * 2
    steps = lines(tmp_path, "step")
    assert [(line["loss"], line["tokens"]) for line in steps] == [(0.5, 20), (1.0, 40)]
    assert all(line["seconds"] > 0 and "other" not in line for line in steps)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path, "validation")] == [(1, 0.25), (2, 0.25)]
    assert [row["validation/loss"] for row in table(tmp_path / "metrics.csv")] == ["", "0.25", "", "0.25"]
    assert len(lines(tmp_path, "ranks")[-1]["ranks"]) == 2


def test_what_ends_a_run_is_kept_by_every_rank(tmp_path: Path) -> None:
    run, made = tmp_path / "run", models(2)

    def train(world: sw.World) -> None:
        with engine_of(made[world.rank], world, run, preset="zero2") as engine:
            for step in range(1, 4):
                if step == 3 and world.rank == 1:
                    raise ValueError("a bad batch")
                engine.log({"loss": engine.train_step(batch(step, world.rank), loss_fn=loss_of)})

    with pytest.raises((FaultError, ValueError)):
        run_ranks(2, train, patience_seconds=0.2)
    (end,) = lines(run, "end")
    assert (end["status"], end["step"]) == ("failed", 2)
    assert "a bad batch" in end["error"]
    notes = {note.rank: note for note in read_notes(run) if note.level == "error"}
    assert notes[1].text == "ValueError: a bad batch"
    assert "rank 1" in notes[0].text.lower()


def test_a_late_rank_is_noted_by_one_that_waits(tmp_path: Path) -> None:
    run, made = tmp_path / "run", models(2)

    def is_noted() -> bool:
        return any((note.level, note.rank) == ("warning", 1) and "rank 0" in note.text for note in read_notes(run))

    def train(world: sw.World) -> None:
        with engine_of(made[world.rank], world, run, preset="ddp") as engine:
            for step in range(1, 3):
                if step == 2 and world.rank == 0:
                    wait_until(is_noted)
                engine.train_step(batch(step, world.rank), loss_fn=loss_of)

    run_ranks(2, train, patience_seconds=0.2)


def test_without_a_folder_nothing_is_written_and_means_come_all_the_same(tmp_path: Path) -> None:
    made = models(2)

    def train(world: sw.World) -> dict[str, float]:
        optimizer = torch.optim.SGD(made[world.rank].parameters(), lr=0.1)
        with sw.shard(made[world.rank], "zero3", optimizer=optimizer, world=world) as engine:
            with pytest.raises(ConfigError, match="name is 'text'"):
                engine.log({"name": "text"})
            with pytest.raises(ConfigError, match="rank 1 logs one, and rank 0 zero"):
                engine.log({"one" if world.rank else "zero": 1})
            return engine.log({"value": torch.tensor(float(world.rank)), "other": 3})

    assert run_ranks(2, train) == [{"value": 0.5, "other": 3.0}] * 2


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"trackers": ["tensorboard"]}, "need a folder to write to"),
        ({"trackers": ["wandb"], "run": "here"}, r"pip install shardwise\[wandb\]"),
        (
            {"trackers": ["comet"], "run": "here"},
            r"the package comet_ml is not installed: pip install shardwise\[comet\]",
        ),
        ({"profile": {"steps": [2, 3]}}, "no folder for traces"),
        ({"profile": {"steps": [2, 3], "folder": "x", "memory": True}}, "no allocator of cpu"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_changes(
    plan: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (model,) = models(1)
    with pytest.raises(ConfigError, match=words):
        sw.shard(model, plan)
    assert not list(tmp_path.iterdir())
    assert model(torch.ones(1, 16)).shape == (1, 1)
    assert sorted(model.state_dict()) == sorted(models(1)[0].state_dict())


@pytest.mark.parametrize("run", ["runs/first", "~/runs/first", "$HOME/runs/${NAME}"])
def test_a_run_is_in_the_folder_that_its_plan_named(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the home or of a variable; a relative one is that of the moment when the engine was made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NAME", "first")
    monkeypatch.chdir(tmp_path)
    (model,) = models(1)
    plan = {"trackers": ["jsonl", "csv"], "profile": {"steps": [1, 1]}}
    (tmp_path / "elsewhere").mkdir()
    with engine_of(model, sw.World.join(environment={}), Path(run), **plan) as engine:
        monkeypatch.chdir(tmp_path / "elsewhere")
        engine.log({"loss": engine.train_step(batch(1, 0), loss_fn=loss_of)})
    assert {"record.jsonl", "metrics.csv", "profile"} <= {one.name for one in (tmp_path / "runs/first").iterdir()}
    assert sorted(one.name for one in tmp_path.iterdir()) == ["elsewhere", "runs"]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(("run", "words"), [("", "empty"), ("$NOT_SET_HERE/1", "not all of its variables are set")])
def test_a_run_in_no_folder_is_refused(run: str, words: str) -> None:
    (model,) = models(1)
    with pytest.raises(ConfigError, match=f"The plan's run is .*{words}"):
        sw.shard(model, {"run": run})


@pytest.mark.parametrize("chosen_by", ["plan", "environment"])
def test_a_profile_of_two_steps_names_units_and_actions(
    chosen_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (model,) = models(1)
    plan: dict[str, Any] = {"profile": {"steps": [2, 3]}}
    if chosen_by == "environment":  # as `shardwise launch --profile` sets it; it overrides the plan's window
        monkeypatch.setenv("SHARDWISE_PROFILE", "2:3")
        plan = {"profile": {"steps": [1, 1]}}
    with engine_of(model, sw.World.join(environment={}), tmp_path, **plan) as engine:
        for step in range(1, 5):
            engine.train_step(batch(step, 0), loss_fn=loss_of)
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank-0-steps-2-3.json"
    events = json.loads(path.read_text())["traceEvents"]
    by_process: dict[object, list[dict[str, Any]]] = {}
    for event in events:
        by_process.setdefault(event["pid"], []).append(event)
    ours = by_process["shardwise 0"]
    kernels = [event for event in events if event.get("cat") == "cpu_op" and event["name"] == "aten::addmm"]
    assert len(kernels) == 2 * 3  # of two steps, and not of four
    spans = [event for event in ours if event["name"].startswith("forward ") and event["ph"] == "b"]
    assert len(spans) == 2 * len({event["name"] for event in spans}) > 0
    ends = [event for event in ours if event["name"].startswith("backward ") and event["ph"] == "e"]
    assert spans[0]["ts"] <= kernels[0]["ts"] <= ends[-1]["ts"]  # on one clock


def test_steps_are_trained_where_their_profile_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model,) = models(1)
    (tmp_path / "profile").write_text("a file, where the folder of the profile should be")
    with engine_of(model, sw.World.join(environment={}), tmp_path, profile={"steps": [1, 1]}) as engine:
        for step in range(1, 3):
            engine.train_step(batch(step, 0), loss_fn=loss_of)
        assert engine.num_steps == 2
    assert "rank-0-steps-1-1.json cannot be written: File exists. Training continues without it." in caplog.text


def test_a_tracker_whose_server_is_gone_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Libraries of trackers raise errors of their own, such as MLflow's `MlflowException`."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no answer from https://metrics.example")

    monkeypatch.setattr(CSV, "log", refuse)
    (model,) = models(1)
    with engine_of(model, sw.World.join(environment={}), tmp_path, trackers=["jsonl", "csv"]) as engine:
        for step in range(1, 3):
            engine.train_step(batch(step, 0), loss_fn=loss_of)
            engine.log({"loss": 1.0})
    (told,) = [one for one in caplog.messages if "tracker" in one]
    assert told.startswith("The log of the tracker csv cannot be written: no answer from https://metrics.example.")
    assert [line["step"] for line in lines(tmp_path, "step")] == [1, 2]


def test_an_earlier_run_in_the_same_folder_is_kept_apart(tmp_path: Path) -> None:
    """A script runs twice without resuming, and a third time resumes: each record is whole, and readable."""
    run, kept, profiled = tmp_path / "run", tmp_path / "kept", tmp_path / "run" / "profile"
    made = [models(2) for _ in range(3)]

    def train(world: sw.World, number: int, steps: range, resumes: bool = False) -> None:
        with engine_of(made[number][world.rank], world, run, trackers=["jsonl", "csv"]) as engine:
            if resumes:
                assert engine.resume(kept) is not None
            world.barrier()  # rank 0 has opened the folder
            logging.getLogger("shardwise").warning("early in %d", number)
            for step in steps:
                engine.train_step(batch(step, world.rank), loss_fn=loss_of)
                engine.log({"loss": 100.0 * number + step})
            logging.getLogger("shardwise").warning("late in %d", number)
            engine.save(kept)

    run_ranks(2, lambda world: train(world, 0, range(1, 7)))
    profiled.mkdir()
    (profiled / "rank-0-steps-1-2.json").write_text("{}")
    first = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    assert {"record.jsonl", "metrics.csv", "timeline.json", "program.txt", "notes-rank-0.jsonl"} <= set(first)
    run_ranks(2, lambda world: train(world, 1, range(1, 3)))
    assert not (run / "timeline.json").exists(), "this run was too short to have one"
    run_ranks(2, lambda world: train(world, 2, range(3, 5), True))

    earlier = run / "earlier-1"
    assert {path.name: path.read_bytes() for path in earlier.iterdir() if path.is_file()} == first
    assert (earlier / "profile" / "rank-0-steps-1-2.json").read_text() == "{}"
    assert [line["loss"] for line in lines(run, "step")] == [101.0, 102.0, 203.0, 204.0]
    assert [line["step"] for line in lines(run, "resume")] == [2]
    assert [row["loss"] for row in table(run / "metrics.csv")] == ["101.0", "102.0", "203.0", "204.0"]
    told = [(note.rank, note.text) for note in read_notes(run) if " in " in note.text]
    assert {text for _, text in told} == {"early in 1", "late in 1", "early in 2", "late in 2"}
    (moved,) = {note.text for note in read_notes(run) if "earlier-1" in note.text}
    assert (
        moved == f"{run} has an earlier run, which this one does not resume. What it recorded was moved to {earlier}."
    )
    assert "early in 1" not in html_report(read_run(earlier))
    assert "late in 0" in html_report(read_run(earlier))


def test_what_is_not_finite_is_traced_to_rank_samples_and_unit(tmp_path: Path) -> None:
    """A bad sample on rank 1 makes its loss nan; then a bad gradient begins in one unit's backward."""
    run, replicas = tmp_path / "run", models(2)
    rows = [torch.ones(16) for _ in range(8)]
    rows[6] = torch.full((16,), math.inf)

    def train(world: sw.World) -> None:
        model = replicas[world.rank]
        with engine_of(model, world, run, preset="zero3", skip_nonfinite=True, units=["0", "1", "2"]) as engine:
            loader = sw.data.Loader(rows, batch_rows=4, samples=sw.data.Samples(shuffle=False), world=engine.data_ranks)
            for x in loader:
                engine.log({"loss": engine.train_step(x, loss_fn=loss_of)})
                if engine.num_steps == 1 and loader.step == 2:
                    break
            model[1].register_full_backward_hook(lambda _, grads, __: (grads[0] * math.inf,))
            loss = engine.train_step(batch(0, world.rank), loss_fn=loss_of)
            engine.log({"loss": loss})

    run_ranks(2, train)
    found = [(line["rank"], line["words"]) for line in lines(run, "unusual")]
    bad_sample, its_norm, in_unit = found
    assert bad_sample[0] == 1
    assert "its loss is " in bad_sample[1]
    assert "6" in bad_sample[1].partition("it had")[2]
    assert its_norm[1].endswith("those of all units, from the loss on")
    assert in_unit[1].endswith("those of 1 of 3 units, of which 0 is the first in the backward")
    assert "those of all units" in html_report(read_run(run))


MICRO_BATCHES = {
    "one batch, cut": 1,
    "a list": 4,
    "a list of batches": 1,
    "a loop's own": 4,
    "a loop's own batches": 1,
}
"""How a loop gives four micro-batches, and in how many its loader hands out a batch."""


@sampled
@pytest.mark.parametrize("form", MICRO_BATCHES)
@pytest.mark.parametrize("value", [math.inf, 1e4])
@pytest.mark.parametrize("preset", ["zero3", "ddp"])
def test_a_bad_loss_is_traced_to_the_micro_batch_and_its_samples(
    form: str, value: float, preset: str, tmp_path: Path
) -> None:
    """Of 16 rows a step each of two ranks has 8, in micro-batches of two; row 13 of a late one is bad."""
    run, replicas = tmp_path / "run", models(2)
    bad = 16 * 25 + 13
    rows = [torch.full((16,), value if row == bad else 1.0) for row in range(bad + 16)]
    batch_rows = 4 if MICRO_BATCHES[form] == 1 and form != "one batch, cut" else 16
    if batch_rows == 4:  # the bad sample where the second rank has it, in the third batch of a step
        rows[bad], rows[16 * 25 + 11] = rows[16 * 25 + 11], rows[bad]

    def train(world: sw.World) -> None:
        model = replicas[world.rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        plan = {"run": str(run), "preset": preset, "accumulate": 4, "skip_nonfinite": True}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            parts = iter(
                sw.data.Loader(
                    rows,
                    batch_rows=batch_rows,
                    accumulate=MICRO_BATCHES[form],
                    samples=sw.data.Samples(shuffle=False),
                    world=engine.data_ranks,
                )
            )
            for _ in range(26):
                if form == "one batch, cut":
                    loss = engine.train_step(next(parts), loss_fn=loss_of)
                elif form.startswith("a list"):
                    loss = engine.train_step(list(islice(parts, 4)), loss_fn=loss_of)
                else:
                    loss = torch.zeros(())
                    for part in islice(parts, 4):
                        own = loss_of(model(part))
                        engine.backward(own)
                        engine.step()
                        loss += own.detach() / 4
                engine.eval_step([torch.ones(1, 16)] * 4, loss_fn=loss_of)  # whose losses are not the step's
                engine.log({"loss": loss})

    run_ranks(2, train)
    ((rank, words),) = [(line["rank"], line["words"]) for line in lines(run, "unusual") if "its loss" in line["words"]]
    assert rank == 1
    assert "; micro-batch 2 of 4 has " in words
    if batch_rows == 4:
        assert words.endswith(f"samples {bad - 3}, {bad - 2} of source, rows 2 to 3 of the batch of step 102")
    else:
        assert words.endswith(f"samples {bad - 1}, {bad} of source, rows 12 to 13 of the batch of step 25")


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_bad_loss_in_a_plain_loop_is_traced_to_all_batches_of_its_step(accumulate: int, tmp_path: Path) -> None:
    """The engine does not see what `loss.backward()` goes back from, so it may be any of them; but none that the loop
    reads afterwards, to evaluate."""
    run, (model,) = tmp_path / "run", models(1)
    rows = [torch.full((16,), math.inf if row == 4 * 5 + 1 else 1.0) for row in range(48)]

    def train(world: sw.World) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        plan = {"run": str(run), "preset": "ddp", "accumulate": accumulate, "skip_nonfinite": True}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:

            def loader() -> sw.data.Loader:
                samples = sw.data.Samples(shuffle=False)
                return sw.data.Loader(rows, batch_rows=4, samples=samples, world=engine.data_ranks)

            batches = iter(loader())
            for _ in range(3):
                loss = torch.zeros(())
                for part in islice(batches, 4):
                    own = loss_of(model(part)) / 4
                    own.backward()
                    loss += own.detach()
                optimizer.step()
                optimizer.zero_grad()
                next(iter(loader()))
                engine.log({"loss": loss})

    run_ranks(1, train)
    (words,) = [line["words"] for line in lines(run, "unusual") if "its loss" in line["words"]]
    each = "; ".join(f"samples {', '.join(str(4 * step + row) for row in range(4))} of source" for step in range(4, 8))
    assert words.endswith(f"; it had {each}, rows 0 to 3 of the batches of steps 4 to 7")


class Faulty(nn.Module):
    """Its gradients, or what it gives, are not finite in the micro-batch that has a 7."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(16, 16), where

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        is_bad = (x == 7).any() if self.where else False
        if self.where == "forward" and is_bad:
            return out * math.inf
        if self.where == "backward" and is_bad:
            out.register_hook(lambda grad: grad * math.inf)
        return torch.cat([out[..., :-1], x[..., -1:]], -1)  # the last feature is as it came


@sampled
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "gpipe"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("faulty", range(6))
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_not_finite_in_a_pipeline_is_traced_to_stage_unit_and_micro_batch(
    schedule: str, where: str, faulty: int, num_replicas: int, tmp_path: Path
) -> None:
    run, num_ranks = tmp_path / "run", 2 * num_replicas
    torch.manual_seed(0)
    first = nn.Sequential(*(Faulty(where if block == faulty else "") for block in range(6)))
    replicas = [copy.deepcopy(first) for _ in range(num_ranks)]
    x = torch.ones(8, 16)
    x[5, -1] = 7.0

    def train(world: sw.World) -> int:
        plan = {
            "preset": "zero1",
            "mesh": {"pp": 2, "dp": num_replicas},
            "pipeline": {"schedule": schedule},
            "accumulate": 4,
            "skip_nonfinite": True,
        }
        with engine_of(replicas[world.rank], world, run, **plan) as engine:
            engine.log({"loss": engine.train_step(x, loss_fn=loss_of)})
            stages = inside.sharded(engine).parts.pipeline.layout.stages
            return next(number for number, names in enumerate(stages) if str(faulty) in names)

    stage = run_ranks(num_ranks, train)[0]
    found = [line["words"] for line in lines(run, "unusual")]
    losses = [words for words in found if "its loss" in words]
    (norm,) = [words for words in found if "norm" in words]
    if where == "forward":
        assert len(losses) == num_ranks
        assert all("micro-batch 2 of 4 has " in words for words in losses)
        assert norm.endswith("those of all units, from the loss on")
    elif faulty == 5:
        assert norm.endswith("those of all units, from the loss on")
    else:
        assert norm.endswith(
            f"those of {faulty + 1} of 6 units, of which {faulty} (stage {stage}) is the first in the backward"
        )


def test_a_rank_that_is_the_first_when_its_memory_has_moved_ends_the_record(tmp_path: Path) -> None:
    """Rank 0 is lost, and the next one ends in another loss, before it has taken a step as the first."""
    run, replicas = tmp_path / "run", models(2)

    def train(world: sw.World) -> None:
        engine = engine_of(replicas[world.rank], world, run)
        engine.log({"loss": engine.train_step(batch(1, world.rank), loss_fn=loss_of)})
        world.barrier()  # rank 0 has begun the record
        if world.rank == 1:
            world.rank = 0
            inside.run_log(engine).go_on(world, inside.sharded(engine))
            take_down(inside.sharded(engine))
            inside.run_log(engine).close(FaultError("Another rank was lost."))

    run_ranks(2, train)
    assert [line["step"] for line in lines(run, "step")] == [1]
    (resumed,), (end,) = lines(run, "resume"), lines(run, "end")
    assert (resumed["step"], resumed["device"]) == (1, "cpu")
    assert end["status"] == "failed"
    assert "Another rank was lost." in end["error"]
