"""DeepSpeed's calls where micro-batches end: any backward, boundaries that a script sets, and saving between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
import shardwise.integrations.deepspeed as deepspeed
from shardwise.errors import StateError
from shardwise.testing import run_ranks
from tests.ranks.twins import normal_batches
from tests.thorough import sampled

Tensor = torch.Tensor
Engine = deepspeed.DeepSpeedEngine
RANKS, GAS, ROWS = 2, 2, 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": GAS,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


def batches() -> list[tuple[Tensor, Tensor]]:
    rows = RANKS * ROWS
    return normal_batches(4, (rows, 6), (rows, 4))


def plain(lasts: tuple[int, ...], divisor: int = GAS) -> Tensor:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        (F.mse_loss(module(x), y) / divisor).backward()
        if number in lasts:
            optimizer.step()
            optimizer.zero_grad()
    return module.weight.detach()


def trained(
    stage: int, train: Callable[[Engine, list[tuple[Tensor, Tensor]]], object], **config: Any
) -> list[tuple[Engine, Tensor]]:
    models = [model() for _ in range(RANKS)]

    def rank(world: sw.World) -> tuple[Engine, Tensor]:
        mine = models[world.rank]
        settings = {**CONFIG, "zero_optimization": {"stage": stage}, **config}
        engine, *_ = deepspeed.initialize(model=mine, model_parameters=mine.parameters(), config=settings, world=world)
        own = slice(world.rank * ROWS, (world.rank + 1) * ROWS)
        train(engine, [(x[own], y[own]) for x, y in batches()])
        weight = engine.shardwise.get("weight")
        assert weight is not None
        engine.destroy()
        return engine, weight

    return run_ranks(RANKS, rank)


def by_loss(engine: Engine, loss: Tensor) -> None:
    loss.backward()  # DeepSpeed divides what comes of it, too (its test_grad_accumulation)


def by_scale(engine: Engine, loss: Tensor) -> None:
    engine.scale(loss).backward()


def keeping_the_graph(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss / 2, retain_graph=True)
    engine.backward(loss / 2)


def undivided(engine: Engine, loss: Tensor) -> None:
    engine.backward(loss / GAS, scale_wrt_gas=False)


@sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("backward", [by_loss, by_scale, keeping_the_graph, undivided])
def test_any_backward_is_averaged_over_micro_batches(backward: Callable[[Engine, Tensor], None], stage: int) -> None:
    def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        for number, (x, y) in enumerate(data):
            backward(engine, F.mse_loss(engine(x), y))
            engine.step()
            assert engine.was_step_applied() == (number % GAS == GAS - 1)
            assert engine.global_steps == (number + 1) // GAS

    for _, weight in trained(stage, train):
        torch.testing.assert_close(weight, plain((1, 3)), rtol=1e-5, atol=1e-6)


def test_a_script_that_divides_its_loss_itself_is_told_that_this_is_done(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed divides gradients of `loss.backward()`, too: they are not the plain loop's, but that is not silent."""

    def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data:
            (F.mse_loss(engine(x), y) / GAS).backward()
            engine.step()

    for _, weight in trained(2, train):
        torch.testing.assert_close(weight, plain((1, 3), GAS * GAS), rtol=1e-5, atol=1e-6)
    assert caplog.text.count("A loop that divides its loss as well divides twice.") == 1


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_boundary_that_the_script_sets(stage: int) -> None:
    """As in DeepSpeed's docstring: one call of `step` after the backwards of three micro-batches, and of one."""

    def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        for number, (x, y) in enumerate(data):
            engine.set_gradient_accumulation_boundary(number >= 2)
            engine.backward(F.mse_loss(engine(x), y))
            if engine.is_gradient_accumulation_boundary():
                engine.step()
            assert engine.was_step_applied() == (number >= 2)
        assert engine.global_steps == 2

    for _, weight in trained(stage, train):
        torch.testing.assert_close(weight, plain((2, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_step_is_a_boundary_if_accumulation_is_not_managed(stage: int) -> None:
    def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        with pytest.raises(StateError, match="every engine"):
            engine.set_gradient_accumulation_boundary(True)
        for number, (x, y) in enumerate(data):
            engine.backward(F.mse_loss(engine(x), y))
            assert not engine.is_gradient_accumulation_boundary()
            if number in (0, 3):
                engine.step()
                assert engine.was_step_applied()
        assert (engine.global_steps, engine.global_samples) == (2, 4 * ROWS * RANKS)

    for _, weight in trained(stage, train, managed_gradient_accumulation=False):
        torch.testing.assert_close(weight, plain((0, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_saving_between_micro_batches(stage: int, tmp_path: Path) -> None:
    """What has come of the step's gradients goes on where it is; a run that loads begins the step anew."""

    def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        for number, (x, y) in enumerate(data):
            engine.backward(F.mse_loss(engine(x), y))
            if number == 2:
                engine.save_checkpoint(tmp_path)
            engine.step()

    def again(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        engine.load_checkpoint(tmp_path)
        assert (engine.global_steps, engine.micro_steps) == (1, GAS)
        for x, y in data[2:]:
            engine.backward(F.mse_loss(engine(x), y))
            engine.step()

    expected = plain((1, 3))
    for _, weight in [*trained(stage, train), *trained(stage, again)]:
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@sampled
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("backward", [by_loss, by_scale])
def test_gradients_summed_over_ranks(backward: Callable[[Engine, Tensor], None], stage: int) -> None:
    def train(engine: Engine, data: list[tuple[Tensor, Tensor]]) -> None:
        for x, y in data:
            backward(engine, F.mse_loss(engine(x), y))
            engine.step()

    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches()):
        (F.mse_loss(module(x), y) * RANKS / GAS).backward()
        if number % GAS == GAS - 1:
            optimizer.step()
            optimizer.zero_grad()
    for _, weight in trained(stage, train, gradient_allreduce_op="SUM"):
        torch.testing.assert_close(weight, module.weight.detach(), rtol=1e-5, atol=1e-6)
