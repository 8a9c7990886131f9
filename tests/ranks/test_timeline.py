"""The timeline of a step: every action of the program, for every unit, on every rank, in a format that viewers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from twins import adamw, batches, work_on_ranks

import shardwise as sw
from shardwise.system.calibration import Calibration, DiskFigures, write_calibration
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer


def test_a_step_is_written_with_units_and_actions(tmp_path: Path) -> None:
    start = Transformer()
    path = tmp_path / "traces" / "step.json"

    def work(engine: sw.Engine) -> list[str]:
        data = batches(3)
        for number, (x, y) in enumerate(data):
            if number < 2:
                engine.backward(engine(x, y))
                engine.step()
                continue
            with engine.timeline(path):
                engine.backward(engine(x, y))
                engine.step()
        planned = inside.program(engine)
        return [str(action) for block in (*planned.micro_batch, *planned.step) for action in block.actions]

    planned = work_on_ranks(2, work, "zero3", start)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    for number, actions in enumerate(planned):
        own = [event for event in events if event["pid"] == number]
        done = sorted((event for event in own if event["ph"] == "X"), key=lambda event: event["ts"])
        assert [event["name"] for event in done] == actions
        begun = [event["name"] for event in own if event["ph"] == "b"]
        ended = [event["name"] for event in own if event["ph"] == "e"]
        assert sorted(begun) == sorted(ended)
        assert {f"forward blocks.{block}" for block in range(3)} <= set(begun)
        assert {f"backward blocks.{block}" for block in range(3)} <= set(begun)
        _assert_gathers_run_ahead(own)


def _assert_gathers_run_ahead(events: list[dict[str, Any]]) -> None:
    """The gather of a block begins before the previous block is complete."""
    times = {(event["ph"], event["name"]): event["ts"] for event in reversed(events) if event["ph"] in "be"}
    assert times["b", "blocks.1 param"] < times["e", "forward blocks.0"]


def test_nothing_is_recorded_outside(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with sw.shard(model, "zero3", optimizer=adamw(model)) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
        assert not inside.sharded(engine).parts.timeline.events
        with engine.timeline(tmp_path / "empty.json"):
            pass
        assert not inside.sharded(engine).parts.timeline.events


def test_ops_of_a_pipeline_and_what_they_wait_for_are_on_it(tmp_path: Path) -> None:
    models = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))) for _ in range(2)]
    path = tmp_path / "step.json"

    def rank(world: sw.World) -> list[str]:
        plan = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 3, "pipeline": {"schedule": "zb-h1"}}
        with sw.shard(models[world.rank], plan, optimizer=adamw(models[world.rank]), world=world) as engine:
            with engine.timeline(path):
                engine.train_step(torch.ones(3, 4), loss_fn=torch.sum)
            layout = inside.sharded(engine).parts.pipeline.layout  # type: ignore[union-attr]
            return [f"{op.kind}{op.micro_batch}@{op.stage}" for op in layout.schedule.rows[world.rank]]

    rows = run_ranks(2, rank)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    for number, row in enumerate(rows):
        own = [event for event in events if event["pid"] == number and event.get("cat") == "stages"]
        done = [event["name"] for event in own if event["ph"] == "e" and not event["name"].startswith("wait")]
        assert done == row
        waited = {event["name"].removeprefix("wait ") for event in own if event["name"].startswith("wait")}
        assert waited == {op for op in row if op[0] == "BF"[number]}


def test_a_disk_is_on_it_and_is_asked_as_it_was_measured_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each unit's states are read and written once. The next ones are read while one is updated, and the first ones
    while the model computes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    disk = DiskFigures(1e9, 1e9, 3, 2**16, True, "today")
    write_calibration(Calibration("here", {str(tmp_path): disk}))
    torch.manual_seed(0)
    model, (x, y) = Transformer(), batches(1)[0]
    plan = {"preset": "infinity", "disk": str(tmp_path / "scratch")}
    with sw.shard(model, plan, optimizer=adamw(model)) as engine:
        assert inside.disk(engine) is not None
        queue = inside.disk(engine)._queue
        assert (queue.depth, queue.block_bytes) == (3, 2**16)
        with engine.timeline(tmp_path / "step.json"):
            engine.backward(engine(x, y))
            engine.step()
        units = [unit.name for unit in inside.units(engine)]
    events: list[dict[str, Any]] = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    for verb in ("read", "write"):
        expected = [f"{verb} {unit} states" for unit in units]
        mine = [event for event in events if event["name"].startswith(f"{verb} ")]
        first, last = ([event["name"] for event in mine if event["ph"] == edge] for edge in "be")
        assert first == expected
        assert sorted(last) == sorted(expected), "on several threads, so not always in this order"
    begun = {event["name"]: event["ts"] for event in events if event["ph"] == "b"}
    updates = [event for event in events if event["ph"] == "X" and event["name"].startswith("update")]
    first_grad = min(event["ts"] for event in events if event["ph"] == "X" and " grad " in event["name"])
    assert begun[f"read {units[0]} states"] < first_grad, "in the forward"
    for unit, before in zip(units[1:], updates[:-1], strict=True):
        assert begun[f"read {unit} states"] <= before["ts"]
