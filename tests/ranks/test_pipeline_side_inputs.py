"""What a forward uses besides the activation that stages pass on is detected, with and without gradients through it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import FaultError, ModelError
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH = 6
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")


class Blocks(nn.Module):
    """Four blocks, between which `beside` adds an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = first = self.first(x)
        for block in self.blocks:
            hidden = self.beside(block(hidden), first)
        return hidden

    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden


class DetachedSkip(Blocks):
    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden + first.detach()


class MaskOfActivations(Blocks):
    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden.masked_fill(first > 0.5, 0.0)


class InPlaceOfZeros(Blocks):
    """Values reach the output through a tensor that is written to in place."""

    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        store = torch.zeros_like(hidden)
        store[:, :2] = first.detach()[:, 1:3]
        return hidden + store.view(-1).view_as(hidden)


class WithoutGradients(Blocks):
    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        with torch.no_grad():
            scale = first.square().mean(-1, keepdim=True)
        return hidden * scale


class InEvaluation(Blocks):
    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden if self.training else hidden + first


class Statistic(Blocks):
    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(first.mean(), 0.1)
        return hidden


class ReadsNumber(Blocks):
    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden if first.detach().mean().item() > -100 else hidden * 2


class OnlyLooks(Blocks):
    """Uses shapes, dtypes and devices of earlier outputs, and overwrites one."""

    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        ones = torch.ones_like(first) + first.new_full((first.shape[-1],), 0.5)
        fresh = first.detach().clone().zero_()
        fresh.copy_(ones)
        return hidden * fresh.to(first.dtype)


def run(model: nn.Module, *, num_ranks: int = 2, evaluates: bool = False, **more: Any) -> list[list[float]]:
    x, y = data()
    full = {"preset": "zero1", "mesh": {"pp": num_ranks}, "accumulate": 4, **more}

    def work(engine: sw.Engine) -> list[float]:
        mine = engine.module
        losses = [float(engine.train_step(x, y, loss_fn=F.mse_loss)) for _ in range(3)]
        if evaluates:
            mine.eval()
            losses.append(float(engine.eval_step(x, y, loss_fn=F.mse_loss)))
        return losses

    return work_on_ranks(num_ranks, work, full, model, lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1))


def data() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return torch.randn(8, WIDTH, generator=numbers), torch.randn(8, WIDTH, generator=numbers)


def plain(model: nn.Module) -> list[float]:
    model = copy.deepcopy(model)
    optimizer, (x, y), losses = torch.optim.SGD(model.parameters(), lr=0.1), data(), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, F.mse_loss(model.eval()(x), y).item()]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "kind", [DetachedSkip, MaskOfActivations, InPlaceOfZeros, WithoutGradients, InEvaluation, Blocks, OnlyLooks]
)
@sampled
def test_values_of_earlier_outputs_are_carried_and_shapes_need_not_be(kind: type[Blocks], schedule: str) -> None:
    model = kind()
    for losses in run(model, evaluates=True, pipeline={"schedule": schedule}):
        assert losses == pytest.approx(plain(model), rel=1e-5)


class Counts(Blocks):
    """Counts its forwards in a buffer and in an attribute; its result depends on both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        self.num_calls += 1
        return super().forward(x)

    def beside(self, hidden: Tensor, first: Tensor) -> Tensor:
        return hidden * (1 + 0.1 * self.num_forwards.item() + 0.01 * self.num_calls)


def micro_batched(model: nn.Module, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Like `plain`, in four micro-batches."""
    model = copy.deepcopy(model)
    optimizer, (x, y), losses = torch.optim.SGD(model.parameters(), lr=0.1), data(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        parts = [F.mse_loss(model(one), other) / 4 for one, other in zip(x.chunk(4), y.chunk(4), strict=True)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())
    return losses, model.state_dict()


def trained(model: nn.Module, num_ranks: int = 2, **more: Any) -> list[tuple[list[float], dict[str, Tensor]]]:
    x, y = data()
    full = {"preset": "zero1", "mesh": {"pp": num_ranks}, "accumulate": 4, **more}

    def work(engine: sw.Engine) -> tuple[list[float], dict[str, Tensor]]:
        losses = [float(engine.train_step(x, y, loss_fn=F.mse_loss)) for _ in range(3)]
        return losses, engine.state_dict()

    return work_on_ranks(num_ranks, work, full, model, lambda mine: torch.optim.SGD(mine.parameters(), lr=0.1))


def assert_trained_alike(model: nn.Module, **more: Any) -> None:
    losses, state = micro_batched(model)
    for other_losses, other in trained(model, **more):
        assert other_losses == pytest.approx(losses, rel=1e-5)
        assert list(other) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_counters_of_the_model_itself_count_each_micro_batch_once(schedule: str) -> None:
    assert_trained_alike(Counts(), pipeline={"schedule": schedule})


class CountsAtTheEnd(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.seen += 1
        return hidden


class StatisticOfLast(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.seen.lerp_(hidden.detach().mean(), 0.1)
        return hidden


@pytest.mark.parametrize("schedule", SCHEDULES)
@sampled
def test_modules_in_the_row_with_buffers_alone_are_in_a_stage(schedule: str) -> None:
    """Their running statistics come from what they really receive, wherever the cut is."""
    norms = (nn.BatchNorm1d(WIDTH, affine=False) for _ in range(4))
    layers = [layer for norm in norms for layer in (nn.Linear(WIDTH, WIDTH), norm, nn.Tanh())]
    assert_trained_alike(nn.Sequential(nn.BatchNorm1d(WIDTH, affine=False), *layers), pipeline={"schedule": schedule})


class Balanced(nn.Module):
    """Keeps a loss of its own, in one of several ways."""

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.linear, self.keeps = nn.Linear(WIDTH, WIDTH), keeps
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        loss = out.square().mean()
        self.losses.clear()
        if self.keeps == "attribute":
            self.loss = loss
        elif self.keeps == "list":
            self.losses.append(loss)
        elif self.keeps == "recorded":
            self.loss = loss.detach()
        elif self.keeps == "used":
            self.loss = loss
            out = out * (1 + loss)
        return torch.tanh(out)


class SumsLosses(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced(keeps) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        losses = [one.losses for one in self.modules() if isinstance(one, Balanced)]
        return x + sum(sum(one) for one in losses)


REFUSED = {
    "a buffer changed by an earlier output": (Statistic, "changes the buffer seen by what first returned"),
    "a number read from an earlier output": (ReadsNumber, "reads a number from what first returned"),
    "a count of the last stage": (
        CountsAtTheEnd,
        "changes the buffer seen, which is in no pipeline stage",
    ),
    "a statistic of the last stage": (StatisticOfLast, "changes the buffer seen, which is in no pipeline stage"),
    "a loss in an attribute": (partial(SumsLosses, "attribute"), "blocks.0 keeps loss, a loss with gradients"),
    "a loss in a list": (partial(SumsLosses, "list"), "blocks.0 keeps losses, a loss with gradients"),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", REFUSED)
@sampled
def test_what_would_be_otherwise_on_some_stages_is_refused(case: str, schedule: str) -> None:
    make, words = REFUSED[case]
    with pytest.raises((ModelError, FaultError), match=words):
        trained(make(), pipeline={"schedule": schedule})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("keeps", ["recorded", "used"])
@sampled
def test_numbers_that_modules_record_are_no_losses(keeps: str, schedule: str) -> None:
    assert_trained_alike(SumsLosses(keeps), pipeline={"schedule": schedule})
