"""The timeline of a step: every action of the program, every unit, on every rank, in a form that viewers read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from twins import Transformer, adamw, batches

import shardwise as sw
from shardwise.testing import run_ranks


def test_a_step_is_written_with_units_and_actions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    start = Transformer()
    replicas = [copy.deepcopy(start) for _ in range(2)]
    path = tmp_path / "traces" / "step.json"

    def rank(world: sw.World) -> list[str]:
        model = replicas[world.rank]
        data = batches(3)
        with sw.shard(model, "zero3", optimizer=adamw(model), world=world) as engine:
            for number, (x, y) in enumerate(data):
                if number < 2:
                    engine.backward(engine(x, y))
                    engine.step()
                    continue
                with engine.timeline(path):
                    engine.backward(engine(x, y))
                    engine.step()
            planned = engine._sharded.runner.programs.program
            return [str(action) for block in (*planned.micro_batch, *planned.step) for action in block.actions]

    planned = run_ranks(2, rank)
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
    """The gather of a block has begun before the block before it is through."""
    times = {(event["ph"], event["name"]): event["ts"] for event in reversed(events) if event["ph"] in "be"}
    assert times["b", "blocks.1 param"] < times["e", "forward blocks.0"]


def test_nothing_is_recorded_outside(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with sw.shard(model, "zero3", optimizer=adamw(model)) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).sum())
            engine.step()
        assert not engine._sharded.timeline.events
        with engine.timeline(tmp_path / "empty.json"):
            pass
        assert not engine._sharded.timeline.events


def test_ops_of_a_pipeline_and_what_they_wait_for_are_on_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = [torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))) for _ in range(2)]
    path = tmp_path / "step.json"

    def rank(world: sw.World) -> list[str]:
        plan = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 3, "pipeline": {"schedule": "zb-h1"}}
        with sw.shard(models[world.rank], plan, optimizer=adamw(models[world.rank]), world=world) as engine:
            with engine.timeline(path):
                engine.train_step(torch.ones(3, 4), loss_fn=torch.sum)
            layout = engine._sharded.pipeline.layout  # type: ignore[union-attr]
            return [f"{op.kind}{op.micro_batch}@{op.stage}" for op in layout.schedule.rows[world.rank]]

    rows = run_ranks(2, rank)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    for number, row in enumerate(rows):
        own = [event for event in events if event["pid"] == number and event.get("cat") == "stages"]
        done = [event["name"] for event in own if event["ph"] == "e" and not event["name"].startswith("wait")]
        assert done == row
        waited = {event["name"].removeprefix("wait ") for event in own if event["name"].startswith("wait")}
        assert waited == {op for op in row if op[0] == "IF"[number]}
