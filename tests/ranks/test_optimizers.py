"""Every optimizer trains sharded as it does on the plain model, sends and holds what the program says."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import (
    PRESETS_2,
    PRESETS_2X2,
    MakeOptimizer,
    Run,
    Transformer,
    assert_same,
    batches,
    plain_run,
    sharded_run,
)

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.optim import AdamW, Lamb, Lion, Muon, hidden_matrices
from shardwise.program import DURING_STEP
from shardwise.program.footprint import _Walk
from shardwise.testing import run_ranks

CASES = [*PRESETS_2, *PRESETS_2X2, ("zero3", 3, None), ("zero2", 4, None), ("zero3", 1, None)]
IDS = [f"{name}-{n}{'x2' if mesh else ''}" for name, n, mesh in CASES]


def muon(model: nn.Module, **settings: Any) -> Muon:
    hidden = hidden_matrices(model)
    others = [param for param in model.parameters() if all(param is not one for one in hidden)]
    groups = [
        {"params": hidden, "lr": 0.01},
        {"params": others, "use_muon": False, "lr": 3e-3, "weight_decay": 0.0, "adamw_eps": 1e-5},
    ]
    return Muon(groups, **{"iterate_in": "fp32", **settings})


OURS: dict[str, MakeOptimizer] = {
    "lamb": lambda model: Lamb(model.parameters(), lr=0.01, eps=1e-5),
    "muon": muon,
    "muon-bf16": lambda model: muon(model, iterate_in="bf16", adjust_lr_fn="match_rms_adamw"),
    "lion": lambda model: Lion(model.parameters(), lr=1e-4, weight_decay=0.1),
    "adamw": lambda model: AdamW(model.parameters(), lr=3e-3, eps=1e-5),
    "adamw-bf16": lambda model: AdamW(model.parameters(), lr=3e-3, eps=1e-5, state_dtype="bf16"),
    "adamw-int8": lambda model: AdamW(model.parameters(), lr=3e-3, eps=1e-5, state_dtype="int8"),
}
PARAM_TOLERANCE = {"muon-bf16": 1e-3, "adamw-bf16": 3e-4, "adamw-int8": 3e-3}
"""Where a number is rounded to 8 bits, a last bit of a gradient may round it the other way. And a block of 8-bit states
that is cut by a shard has two scales instead of one."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def twins(model: Transformer) -> dict[str, Run]:
    return {name: plain_run(model, batches(6, rows=12), make) for name, make in OURS.items()}


def measure_step(engine: sw.Engine) -> dict[str, Any]:
    """One step more: what every rank sends in it, and what it holds; both as its program says, to the byte."""
    report = engine.memory()
    for kind in ("param", "grad", "working"):
        assert report.measured[kind] == report.promised[kind], kind
    assert 0 <= report.measured["optim"] - report.promised["optim"] < 4 * 60, "but for step counters"
    ledger, planned = engine._ledger, engine._runner.program
    coordinate = engine.mesh.coordinate(engine.world.rank)
    held = watch_update(engine)
    x, y = batches(1, rows=4 * engine.world.size)[0]
    engine.world.barrier()
    ledger.clear()
    engine.backward(engine(x, y))
    engine.step()
    sent, promised = sum(ledger.sent_bytes.values()), planned.sent_bytes(1, coordinate)
    assert sent == promised <= planned.sent_bytes()
    actions = [action for block in (*planned.micro_batch, *planned.step) for action in block.actions]
    assert sum(ledger.calls.values()) == sum(action.communicates for action in actions)
    clock = _Walk({flat.name: flat.spec for flat in engine._flats}, coordinate)
    for block in planned.step:
        if block.moment == DURING_STEP:
            clock.walk(block, engine._runner.specs)
    assert sum(held) == clock.peak
    return {"program": engine.program()}


def watch_update(engine: sw.Engine) -> list[int]:
    """From now on the most that each update held while it looked at whole parameters, beyond what was there."""
    meter, run, peaks = engine._meter, engine._runner.during_step, []

    def during_step() -> None:
        before = meter.now.total()
        meter.reset_peak()
        run()
        assert meter.now.total() == before
        peaks.append(meter.peak_total - before)

    engine._runner.during_step = during_step
    return peaks


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), CASES, ids=IDS)
def test_ours_train_like_the_plain_model(
    name: str, preset: str, num_ranks: int, mesh: Any, model: Transformer, twins: dict[str, Run]
) -> None:
    run = sharded_run(model, batches(6, rows=12), preset, num_ranks, mesh, OURS[name], after=measure_step)
    tolerance = PARAM_TOLERANCE.get(name, 1e-5)
    assert_same(run, twins[name], loss=max(1e-6, tolerance / 10), param=tolerance, norm=max(1e-5, tolerance))
    assert ("during step" in run.extra["program"]) == (name.startswith("muon") or name == "lamb")
