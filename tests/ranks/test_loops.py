"""Ways to train: plain PyTorch style, accumulation, several forwards, evaluation, checkpointing, schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import PRESETS_2, PRESETS_2X2, Batch, adamw, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from tests.models import Transformer
from tests.ranks.twins import warmed
from tests.thorough import sampled

pytestmark = sampled

SOME = [*PRESETS_2, PRESETS_2X2[0], PRESETS_2X2[1]]
IDS = [f"{name}-{n}" for name, n, _ in SOME]
Case = tuple[str, int, Any]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(tied=True)


@pytest.fixture(params=SOME, ids=IDS)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_plain_pytorch_style(case: Case, model: Transformer) -> None:
    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = engine.module(*batch)
        loss.backward()
        engine.clip_grad_norm_(0.7)
        optimizer.step()
        return loss

    data = batches(6)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data, clip=0.7))


def test_accumulation(case: Case, model: Transformer) -> None:
    """Two halves of a batch in one step; the engine averages over micro-batches."""
    losses: list[float] = []

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        total = torch.zeros(())
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = engine(x, y)
            engine.backward(loss)
            total = total + loss.detach() / 2
            norm = engine.step()
            losses.append(0.0 if norm is None else norm)
        return total

    data = batches(6)
    assert_same(sharded_run(model, data, *case, step=step, accumulate=2), plain_run(model, data))


def test_accumulation_in_plain_style(case: Case, model: Transformer) -> None:
    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        total = torch.zeros(())
        for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            loss = engine.module(x, y) / 2
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    data = batches(6)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data))


@pytest.mark.parametrize("together", [True, False], ids=["one-backward", "two-backwards"])
def test_a_second_forward_before_backward(case: Case, model: Transformer, together: bool) -> None:
    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        first, second = (engine(x, y) / 2 for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True))
        if together:
            engine.backward(first + second)
        else:
            engine.backward(first)
            engine.backward(second)
        engine.step()
        return (first + second).detach()

    data = batches(5)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data))


def test_gradients_that_are_thrown_away(case: Case, model: Transformer) -> None:
    """`zero_grad` between backward and step does the same as in PyTorch."""

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        (engine.module(*batch) * 3).backward()
        optimizer.zero_grad()
        loss = engine.module(*batch)
        loss.backward()
        optimizer.step()
        return loss

    data = batches(4)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data))


def test_a_forward_without_backward(case: Case, model: Transformer) -> None:
    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        engine(*batch)
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    data = batches(4)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data))


def test_evaluation_in_between(case: Case, model: Transformer) -> None:
    evaluated: list[tuple[float, float]] = []

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            before = engine(*batch).item()
        loss = engine(*batch)
        with torch.inference_mode():
            between = engine(*batch).item()
        engine.backward(loss)
        engine.step()
        evaluated.append((before, between))
        assert before == pytest.approx(loss.item(), rel=1e-6)
        assert between == pytest.approx(loss.item(), rel=1e-6)
        return loss

    data = batches(5)
    assert_same(sharded_run(model, data, *case, step=step), plain_run(model, data))
    assert len(evaluated) == 5 * case[1]


class Wrapped(nn.Module):
    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recomputed: torch.Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return recomputed


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-tensor", "reentrant"])
@pytest.mark.parametrize("inside", [False, True], ids=["around-unit", "inside-unit"])
def test_activation_checkpointing(case: Case, reentrant: bool, inside: bool) -> None:
    model = Transformer(recomputes=not inside, reentrant=reentrant)
    if inside:
        model.blocks = nn.ModuleList(Wrapped(block, reentrant) for block in model.blocks)
    data = batches(5)
    assert_same(sharded_run(model, data, *case), plain_run(model, data))


def test_a_scheduler_and_groups(case: Case, model: Transformer) -> None:
    """Two parameter groups with their own settings, and a torch scheduler on the user's own optimizer."""

    def two_groups(model: nn.Module) -> torch.optim.Optimizer:
        decay = [param for param in model.parameters() if param.dim() > 1]
        rest = [param for param in model.parameters() if param.dim() < 2]
        optimizer = torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.0, "lr": 1e-3}, {"params": decay, "weight_decay": 0.3}], lr=3e-3
        )
        schedulers[optimizer] = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer

    schedulers: dict[torch.optim.Optimizer, Any] = {}

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> torch.Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        schedulers[optimizer].step()
        return loss

    def plain() -> Any:
        import copy

        twin = copy.deepcopy(model)
        optimizer = two_groups(twin)
        losses = []
        for x, y in data:
            optimizer.zero_grad()
            loss = twin(x, y)
            loss.backward()
            optimizer.step()
            schedulers[optimizer].step()
            losses.append(loss.item())
        return losses, {name: param.detach() for name, param in twin.named_parameters()}

    data = batches(6)
    losses, params = plain()
    run = sharded_run(model, data, *case, two_groups, step=step)
    assert run.losses == pytest.approx(losses, rel=1e-6)
    for name, param in params.items():
        assert torch.allclose(run.params[name], param, atol=1e-5), name


class EagerAdagrad(torch.optim.Adagrad):
    """Adagrad as torch 2.11 has it: a step makes no states, it expects those that the constructor made."""

    def _init_group(self, group: dict[str, Any], *args: Any) -> Any:
        for param in group["params"]:
            assert param.grad is None or self.state[param]["sum"].shape == param.shape
        return super()._init_group(group, *args)  # type: ignore[misc]  # torch's own


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "adam-fused": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True),
    "adamw-foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "adagrad-eager": lambda model: EagerAdagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=1e-3),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-3, eps=1e-5),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-3, eps=1e-5),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.1),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=0.05, t0=2),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-4),
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, amsgrad=True, maximize=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_elementwise_optimizer(name: str, model: Transformer) -> None:
    data = batches(5)
    make = OPTIMIZERS[name]
    assert_same(sharded_run(model, data, "zero3", 2, None, make), plain_run(model, data, make), param=2e-5)


def test_an_optimizer_that_has_taken_steps_already(model: Transformer) -> None:
    """Its states are sharded like the parameters."""
    data = batches(6)
    make = warmed(adamw, data[:3])
    assert_same(sharded_run(model, data[3:], "zero2", 2, None, make), plain_run(model, data[3:], make))
