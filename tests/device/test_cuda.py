"""On one GPU: the presets train as on the CPU, and hold what was promised. Skipped without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))

from twins import Transformer, adamw, batches, plain_run

import shardwise as sw

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "zero3-kept", "offload", "zero3-offload"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_gpu_trains_like_the_cpu(preset: str, precision: str) -> None:
    torch.manual_seed(0)
    model = Transformer(tied=True)
    data = batches(8)
    expected = plain_run(model, data)
    model.cuda()
    plan = {"preset": preset, "precision": precision}
    with sw.shard(model, plan, optimizer=adamw(model), world=sw.World.join(environment={})) as engine:
        losses = []
        for x, y in data:
            loss = engine(x.cuda(), y.cuda())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        report = engine.memory()
    assert losses == pytest.approx(expected.losses, rel=1e-4 if precision == "fp32" else 2e-2)
    assert report.measured["param"] == report.promised["param"]
    assert report.measured["grad"] == report.promised["grad"]
