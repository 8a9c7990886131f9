"""What each stage of a pipeline computes, and between which stages the time is divided best."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.fit.hardware import hardware
from shardwise.fit.stage_balance import Balance, stage_balance
from shardwise.parallel.pipeline import stage_layout
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh

WIDTH, VOCAB = 64, 4096


class Uneven(nn.Module):
    """An embedding with most of the parameters, blocks of two widths, and a small head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH)) for width in (64, 64, 64, 512)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def found(**pipeline: object) -> Balance:
    plan = Plan(preset="zero1", mesh={"pp": 2, "dp": 2}, accumulate=4, pipeline=pipeline)
    mesh = Mesh.of({"pp": 2, "dp": 2}, 4)
    with torch.device("meta"):
        model = Uneven()
    batch = tuple(torch.zeros(64, 512, dtype=torch.int64) for _ in range(2))
    return stage_balance(model, stage_layout(model, plan, mesh), batch, plan, mesh, hardware("h100-sxm"))


def test_time_is_divided_and_not_parameters() -> None:
    balance = found()
    assert [one.modules[0] for one in balance.present] == ["tokens", "blocks.0"]
    present, best = ([one.seconds for one in stages] for stages in (balance.present, balance.best))
    assert sum(best) == pytest.approx(sum(present))
    assert max(best) < 0.8 * max(present)
    assert sum(one.saved_bytes for one in balance.best) == sum(one.saved_bytes for one in balance.present)
    wide = 64 * 512 * 512 * 4  # what GELU keeps, and the next layer
    assert balance.best[1].saved_bytes > 2 * wide
    stages = [list(one.modules) for one in balance.best]
    assert f"pipeline: {{stages: [[{', '.join(stages[0])}], [{', '.join(stages[1])}]]}}" in str(balance)
    listed = found(stages=stages)
    assert listed.gain == pytest.approx(0)
    assert [one.seconds for one in listed.present] == pytest.approx(best)
    assert "would take" not in str(listed)
