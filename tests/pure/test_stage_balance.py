"""What each stage of a pipeline computes, and between which stages the time is divided best."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.fit.hardware import Hardware, hardware
from shardwise.fit.measured_work import Call, Operand, OperatorClock
from shardwise.fit.stage_balance import Balance, stage_balance
from shardwise.parallel.pipeline import balanced, stage_layout
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from tests.models import Decoder

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


def found(on: Hardware | OperatorClock | None = None, **pipeline: object) -> Balance:
    plan = Plan(preset="zero1", mesh={"pp": 2, "dp": 2}, accumulate=4, pipeline=pipeline)
    mesh = Mesh.of({"pp": 2, "dp": 2}, 4)
    with torch.device("meta"):
        model = Uneven()
    batch = tuple(torch.zeros(64, 512, dtype=torch.int64) for _ in range(2))
    return stage_balance(model, stage_layout(model, plan, mesh), batch, plan, mesh, on or hardware("h100-sxm"))


@pytest.mark.parametrize("costs", [[1.0] * 9, [3, 0, 0, 5, 1, 0, 2, 2], [7, 1, 1, 1, 1, 1, 1, 6], [0, 0, 4, 0, 0]])
def test_the_most_expensive_run_is_as_cheap_as_possible(costs: list[float]) -> None:
    """Of all ways to cut a list into so many runs that are not empty."""
    for num in range(1, len(costs) + 1):
        every = [(0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), num - 1)]
        most = [max(sum(costs[start:stop]) for start, stop in pairwise(cuts)) for cuts in every]
        cuts = (0, *balanced(costs, num), len(costs))
        assert cuts in every
        assert most[every.index(cuts)] == min(most)


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


class Ticking:
    """A clock that says a second more whenever it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> float:
        self.asked += 1
        return float(self.asked)


class LookUpsAreSlow(OperatorClock):
    def seconds(self, call: Call) -> float:
        return 1.0 if "embedding" in str(call.operator) else 0.01


CPU = torch.device("cpu")


def test_measured_time_is_divided() -> None:
    """And not what hardware is foreseen to take."""
    balance = found(LookUpsAreSlow(CPU))
    assert balance.best[0].modules == ("tokens",)
    assert balance.best[0].seconds == pytest.approx(2.0, abs=0.2)  # forward and backward
    assert sum(one.saved_bytes for one in balance.best) == sum(one.saved_bytes for one in found().best)


def measured(model: nn.Module, plan: Plan, now: Ticking) -> Balance:
    mesh = Mesh.of({"pp": 2}, 2)
    batch = tuple(torch.zeros(2, 6, dtype=torch.int64) for _ in range(2))
    return stage_balance(model, stage_layout(model, plan, mesh), batch, plan, mesh, OperatorClock(CPU, now))


def test_equal_operators_are_run_once() -> None:
    """Attention, norms, activations and the loss, forward and backward, on operands of their own."""
    asked, seconds = [], []
    for num_blocks in (4, 8):
        now = Ticking()
        with torch.device("meta"):
            model = Decoder(num_blocks=num_blocks)
        balance = measured(model, Plan(preset="zero1", mesh={"pp": 2}, accumulate=4), now)
        asked.append(now.asked)
        seconds.append(sum(one.seconds for one in balance.present))  # as many as there are operators
    assert asked[0] == asked[1]
    assert seconds[1] > seconds[0] > asked[0] / 24  # two readings of each of six runs, twice over
    assert all(one == int(one) for one in seconds)


def test_operands_have_the_layout_of_rehearsed_ones() -> None:
    for rehearsed in (
        torch.empty(3, 4, dtype=torch.bfloat16).t(),
        torch.empty(1, 5).expand(7, 5),
        torch.empty(0, 3),
        torch.empty((), dtype=torch.int64),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ):
        operand = Operand(tuple(rehearsed.shape), rehearsed.stride(), rehearsed.dtype)
        made = operand.made(CPU)
        assert (made.shape, made.stride(), made.dtype) == (rehearsed.shape, rehearsed.stride(), rehearsed.dtype)


def test_an_operator_that_cannot_run_by_itself_is_named() -> None:
    wrong = Call.of(torch.ops.aten.mm.default, (torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")), {})
    with pytest.raises(ModelError, match=r"aten.mm.default cannot be timed by itself: .*cannot be multiplied"):
        OperatorClock(CPU).seconds(wrong)
