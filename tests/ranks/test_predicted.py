"""The predicted time of a step beside the measured one: in the record, the report and the log of a run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from threads_as_members import ThreadMembership, run_members
from twins import adamw, batches, plain_run, work_on_ranks

import shardwise as sw
from shardwise.cli.main import main
from shardwise.elastic import pace_meter
from shardwise.fit.foreseen import count_step, rank_units
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.step_time import step_time
from shardwise.observe import prediction, read_record
from shardwise.observe.differences import BETWEEN, compared, seconds_by_action
from shardwise.observe.run_view import read_run
from shardwise.plan import load_plan
from shardwise.plan.mesh import Mesh
from shardwise.program import Activations
from shardwise.sharded.rehearsed_step import RehearsedStep
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder, Gpt, Mixture, Transformer
from tests.thorough import thorough_only

NUM_STEPS = 16


def trained(run: Path, described: Hardware | None, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> list[float]:
    monkeypatch.setattr(prediction, "described_hardware", lambda _: described)
    torch.manual_seed(0)
    start = Transformer()
    data = batches(NUM_STEPS)
    expected = plain_run(start, data)

    def work(engine: sw.Engine) -> list[float]:
        losses = []
        for x, y in data:
            loss = engine(*(part.chunk(engine.world.size)[engine.world.rank] for part in (x, y)))
            engine.backward(loss)
            engine.step()
            losses.append(engine.log({"loss": loss})["loss"])
        return losses

    losses = work_on_ranks(2, work, {"run": str(run), **plan}, start)[0]
    assert losses == pytest.approx(expected.losses, abs=1e-5)
    return losses


def faster(times: float) -> Hardware:
    """Than processors, in everything."""
    known = hardware("cpu").model_dump()
    for name in ("memory_bytes_per_second",):
        known[name] *= times
    known["peak_flops"] = {dtype: rate * times for dtype, rate in known["peak_flops"].items()}
    known["launch_seconds"] /= times
    for link in ("local", "network"):
        known[link]["latency_seconds"] /= times
        known[link]["bytes_per_second"] *= times
    return Hardware.model_validate(known)


def test_a_run_shows_what_was_predicted_and_what_explains_the_difference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        trained(tmp_path, faster(1e4), monkeypatch, preset="zero3")
    (line,) = [line for line in read_record(tmp_path / "record.jsonl").lines if line["kind"] == "predicted"]
    assert sum(line["parts"].values()) == pytest.approx(line["seconds"])
    assert {"forward blocks.*", "backward blocks.*"} <= line["actions"].keys()
    said = [record.message for record in caplog.records if " predicted on cpu" in record.message]
    assert len(said) == 1
    assert ", mostly " in said[0]
    events = json.loads((tmp_path / "predicted.json").read_text())["traceEvents"]
    assert {"forward blocks.0", "backward blocks.0"} <= {event["name"] for event in events}
    view = read_run(tmp_path)
    difference = view.difference()
    assert difference is not None
    assert difference.measured == view.seconds_per_step
    assert difference.is_large
    assert main(["report", str(tmp_path)]) == 0
    assert "Predicted and measured, a step" in (tmp_path / "report.html").read_text()
    assert main(["top", "--once", str(tmp_path)]) == 0
    assert "predicted on cpu" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "model.py").write_text(
        "from tests.models import Transformer as build\nfrom twins import batches\nbatch = lambda: batches(1)[0]\n"
    )
    asked = ["--model", f"{tmp_path}/model.py:build", "--batch", f"{tmp_path}/model.py:batch", "--hardware", "cpu"]
    assert main(["explain", "zero3", "--world", "2", "--set", f"run={tmp_path}", "--time", *asked]) == 0
    assert f"{tmp_path} has taken" in " ".join(capsys.readouterr().out.split())


def test_the_launcher_of_a_job_that_grows_is_told_its_pace_and_what_other_sizes_would_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "described_hardware", lambda _: hardware("cpu"))
    monkeypatch.setattr(pace_meter, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(ThreadMembership, "most", 8)
    told: list[tuple[int, int, dict[int, float]]] = []

    def tell(self: ThreadMembership, size: int, step_seconds: float, error: float) -> None:
        assert step_seconds > 0
        assert error >= 0
        told.append((self.member, size, dict(self.predicted)))

    monkeypatch.setattr(ThreadMembership, "tell_pace", tell)
    (tmp_path / "images").mkdir()

    def work(world: sw.World, member: int) -> int:
        model = Transformer()
        with sw.shard(
            model, {"preset": "zero2", "run": str(tmp_path / "run")}, optimizer=adamw(model), world=world
        ) as engine:
            for x, y in batches(NUM_STEPS):
                loss = engine(*(part.chunk(world.size)[world.rank] for part in (x, y)))
                engine.backward(loss)
                engine.step()
                engine.log({"loss": loss})
            return engine.num_steps

    assert run_members(2, work, tmp_path / "images") == {0: NUM_STEPS, 1: NUM_STEPS}
    assert {(member, size) for member, size, _ in told} == {(0, 2)}, "one rank tells"
    (line,) = [line for line in read_record(tmp_path / "run" / "record.jsonl").lines if line["kind"] == "predicted"]
    predicted = told[-1][2]
    assert list(predicted) == [1, 2, 3, 4, 5, 6, 8]
    assert predicted[2] == pytest.approx(line["seconds"]), "as it is in the record"


@thorough_only("slow; smaller tests beside it cover the same code")
def test_micro_batches_are_counted_as_the_loop_accumulates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "described_hardware", lambda _: hardware("cpu"))
    found = []
    for number in (1, 2, 5):
        model, run = Transformer(), tmp_path / str(number)
        optimizer = adamw(model)
        with sw.shard(model, {"run": str(run)}, optimizer=optimizer) as engine:
            for batch in batches(2):
                for _ in range(number):
                    engine(*batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.log({"loss": 0.0})
        line = read_run(run).prediction
        assert line is not None
        found.append(line)
    one, two, five = found
    assert five["seconds"] - two["seconds"] == pytest.approx(3 * (two["seconds"] - one["seconds"]), rel=0.2)
    for name in ("forward blocks.*", "backward blocks.*"):
        assert five["actions"][name] == pytest.approx(5 * one["actions"][name], rel=0.2)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_without_a_description_of_the_hardware_nothing_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "rehearse_step", None)
    trained(tmp_path, None, monkeypatch)
    assert read_run(tmp_path).prediction is None


def test_a_prediction_that_fails_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prediction, "rehearse_step", None)
    with caplog.at_level(logging.INFO, logger="shardwise"):
        trained(tmp_path, hardware("cpu"), monkeypatch)
    assert read_run(tmp_path).prediction is None
    assert any("is not predicted" in record.message for record in caplog.records)


TOKENS = torch.arange(32).view(2, 16)
WIDE = {"tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}}
SPLIT: dict[str, tuple[Any, dict[str, Any], tuple[torch.Tensor, ...]]] = {
    "tp": (Transformer, WIDE, batches(1)[0]),
    "sp": (Gpt, {}, (TOKENS, TOKENS % 16)),
    "ep": (Mixture, {}, batches(1)[0]),
}


@pytest.mark.parametrize("axis", SPLIT)
def test_a_split_model_is_predicted_as_before_it_was_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, axis: str
) -> None:
    """With what it computes and sends within its layers, though no other rank is asked."""
    described = hardware("cpu")
    monkeypatch.setattr(prediction, "described_hardware", lambda _: described)
    build, more, batch = SPLIT[axis]
    values = {"preset": "zero3", "mesh": {"dp": 1, axis: 2} if axis != "ep" else {"ep": 2}, **more}

    def rank(world: sw.World) -> None:
        model = build()
        with sw.shard(model, {"run": str(tmp_path), **values}, optimizer=adamw(model), world=world) as engine:
            part = engine.split_sequence(batch) if axis == "sp" else batch
            engine.backward(engine(*part).sum())
            engine.step()
            engine.log({"loss": 0.0})

    run_ranks(2, rank)
    found = read_run(tmp_path).prediction
    assert found is not None
    plan, mesh, model = load_plan(values), Mesh(tuple(values["mesh"]), tuple(values["mesh"].values())), build()
    (units,) = rank_units(model, plan, mesh, optimizer="adamw")
    part = tuple(one[:, :8] for one in batch) if axis == "sp" else batch
    (counted,) = count_step(model, part, plan, mesh, counts_work=True)
    on = described.with_ranks(2, torch.get_num_threads())
    expected = step_time([units.program(plan, counted)], on, mesh, num_micro_batches=1)
    assert found["parts"][f"waiting along {axis}"] > 0
    assert found["parts"] == pytest.approx(expected.breakdown)
    assert found["seconds"] == pytest.approx(expected.timeline.step_seconds)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_a_pipeline_is_predicted_by_its_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    """Which rehearses all stages of the model as it was before it was split, and asks no other rank."""
    described = hardware("cpu")
    monkeypatch.setattr(prediction, "described_hardware", lambda _: described)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 48)
    values = {"preset": "zero1", "mesh": {"dp": 1, "pp": 2}, "accumulate": accumulate}
    rows = batches(1, rows=2 * accumulate)[0]

    def rank(world: sw.World) -> None:
        model = Transformer()
        plan = {"run": str(tmp_path), **values}
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            engine.train_step(rows)
            engine.log({"loss": 0.0})

    run_ranks(2, rank)
    found = read_run(tmp_path).prediction
    assert found is not None
    plan, mesh, model = load_plan(values), Mesh(("dp", "pp"), (1, 2)), Transformer()
    kinds = rank_units(model, plan, mesh, optimizer="adamw")
    counted = count_step(model, tuple(one[:2] for one in rows), plan, mesh, counts_work=True)
    programs = [kind.program(plan, its) for kind, its in zip(kinds, counted, strict=True)]
    expected = step_time(programs, described.with_ranks(2, 48), mesh, num_micro_batches=accumulate)
    assert found["parts"]["waiting along pp"] > 0
    assert found["parts"] == pytest.approx(expected.breakdown)
    assert found["seconds"] == pytest.approx(expected.timeline.step_seconds)


def test_what_stages_wait_for_one_another_is_compared_with_what_was_predicted() -> None:
    line = {"seconds": 1.0, "hardware": "cpu", "parts": {"computing": 0.7, "waiting along pp": 0.3}}
    row = {"computing": 1.2, "waited": {"pp:0>1": 0.2, "pp:1>0": 0.2}}
    found = compared(line, 1.6, row)
    assert found is not None
    assert (found.what, found.by_seconds) == ("computing", pytest.approx(0.5))


def span(name: str, begin: float, end: float, track: str = "units") -> list[dict[str, Any]]:
    return [{"ph": kind, "cat": track, "name": name, "ts": at * 1e6} for kind, at in (("b", begin), ("e", end))]


def test_what_explains_most_is_named() -> None:
    """Nested spans count once, and equal layers together."""
    timeline = [*span("forward model", 0, 10), *span("forward h.0", 1, 3), *span("forward h.1", 3, 7)]
    timeline += [{"ph": "X", "cat": "host", "name": "wait gather h.1", "ts": 3e6, "dur": 1e6}]
    actions = seconds_by_action([*timeline, *span("h.1 param", 0, 9, "on the way")])
    assert actions == pytest.approx({"forward model": 4, "forward h.*": 5, "wait gather h.*": 1})
    line = {"seconds": 6.0, "hardware": "x", "actions": {"forward model": 4, "forward h.*": 1, "wait gather h.*": 1}}
    found = compared(line, 10.0, {"idle": 0.0}, actions)
    assert found is not None
    assert (found.what, found.by_seconds) == ("forward h.*", 4)
    assert str(found) == "10.0 s a step, 6.0 s predicted on x: +67 %, mostly forward h.* (+4.0 s)".replace(" %", "%")
    assert "17 times as long, mostly " in str(compared(line, 100.0, {"idle": 0.0}, actions))
    late = compared(line, 20.0, {"idle": 10.0}, actions)
    assert late is not None
    assert late.what == BETWEEN
    parts = {"seconds": 1.0, "parts": {"computing": 0.5, "recomputing": 0.1, "waiting along dp": 0.4}}
    waits = compared(parts, 1.5, {"computing": 0.6, "waited": {"dp": 0.9}, "idle": 0.0})
    assert waits is not None
    assert waits.what == "waiting along dp"
    quick = compared(parts, 0.5, {"computing": 0.1, "waited": {"dp": 0.4}})
    assert quick is not None
    assert (quick.what, quick.share) == ("computing", -0.5)
    assert compared(parts, 1.1, {}) is not None
    assert compared({"seconds": None}, 1.0, {}) is None


def test_a_live_stage_is_timed_with_the_gradients_that_it_shares() -> None:
    models = [Decoder() for _ in range(2)]
    for model in models:
        model.head.weight = model.tokens.weight

    def rank(world: sw.World) -> dict[str, Any]:
        model = models[world.rank]
        plan = {"preset": "zero1", "mesh": {"pp": 2, "dp": 1}, "accumulate": 2}
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            return dict(RehearsedStep(Activations(())).program(inside.sharded(engine)).holders)

    assert run_ranks(2, rank) == [{"tokens+": (0, 1)}] * 2
