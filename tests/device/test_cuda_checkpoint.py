"""Checkpoints of a model on a GPU: through pinned memory in the background, back bit by bit, and to the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.Dropout(0.2), nn.Linear(512, 512)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(engine: sw.Engine, num_steps: int) -> list[float]:
    device = next(engine.module.parameters()).device
    losses = []
    for _ in range(num_steps):
        loss = engine(torch.ones(4, 512, device=device)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_on_a_gpu_goes_on(tmp_path: Path, wait: bool, precision: str) -> None:
    plan = {"preset": "zero3", "precision": precision}
    model, optimizer = build("cuda")
    with sw.shard(model, plan, optimizer=optimizer) as engine:
        train(engine, 3)
        saved = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        engine.save(tmp_path, wait=wait)
        expected = train(engine, 3)
    model, optimizer = build("cuda")
    with sw.shard(model, plan, optimizer=optimizer) as engine:
        assert engine.resume(tmp_path) is not None
        assert train(engine, 3) == expected
        engine.reshard({"preset": "ddp", "precision": precision})
        train(engine, 1)
    model, optimizer = build("cpu")
    with sw.shard(model, "zero1", optimizer=optimizer) as engine:
        assert engine.resume(tmp_path) is not None
        there = engine.state_dict()
        assert all(torch.equal(saved[name], there[name]) for name in saved)
