"""`engine.train_step` equals the plain loop over micro-batches bit by bit, for any plan and form of micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.errors import ConfigError, ModelError, StateError
from shardwise.testing import run_ranks
from tests.models import LENGTH, Transformer
from tests.ranks.twins import batches
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor
NUM_STEPS, MICRO_BATCHES = 3, 2


class Logits(Transformer):
    """Returns logits; the loss is computed outside."""

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


class WithLoss(Transformer):
    """Returns a dict with the loss, like models of transformers."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x, y)}


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def rows_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    return batches(NUM_STEPS, rows=4, seed=rank)


def as_tuple(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    return engine.train_step((x, y))


def as_dict(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    return engine.train_step({"x": x, "y": y})


def as_list(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    return engine.train_step(list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)))


def as_iterator(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    more = iter([*zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True), (None, None)])
    loss = engine.train_step(more)
    assert next(more) == (None, None)  # takes no more than it needs
    return loss


def with_target(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    return engine.train_step(x, y, loss_fn=cross_entropy)


def plain(engine: sw.Engine, x: Tensor, y: Tensor) -> Tensor:
    losses = []
    for part in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        output = engine(*part[: 1 if type(engine.module) is Logits else 2])
        loss = cross_entropy(output, part[1]) if type(engine.module) is Logits else output
        loss = loss["loss"] if isinstance(loss, dict) else loss
        engine.backward(loss)
        losses.append(loss.detach())
    engine.step(is_last=True)
    return sum(losses) / len(losses)


def trained(
    world: sw.World, preset: str, model: nn.Module, step: Callable[[sw.Engine, Tensor, Tensor], Tensor]
) -> tuple[list[float], list[float | None], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plan = {"preset": preset, "accumulate": MICRO_BATCHES, "clip_grad_norm": 0.5}
    with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
        losses, norms = [], []
        for x, y in rows_of(world.rank):
            losses.append(step(engine, x, y).item())
            norms.append(engine.gradient_norm)
        return losses, norms, engine.state_dict()


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Transformer, as_tuple),
        (WithLoss, as_dict),
        (Transformer, as_list),
        (Transformer, as_iterator),
        (Logits, with_target),
    ],
)
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_a_step_is_the_plain_loop(preset: str, kind: type[nn.Module], step: Any) -> None:
    model = kind()
    runs = []
    for how in (plain, step):
        models = [copy.deepcopy(model) for _ in range(2)]
        runs.append(run_ranks(2, lambda world: trained(world, preset, models[world.rank], how)))  # noqa: B023
    for (losses, norms, params), (other_losses, other_norms, other_params) in zip(*runs, strict=True):
        assert losses == other_losses
        assert norms == other_norms
        assert all(torch.equal(params[name], other_params[name]) for name in params)


def test_evaluation_changes_nothing_and_gives_the_mean_loss() -> None:
    model = Transformer()
    x, y = rows_of(0)[0]
    expected = model(x, y).item()

    def rank(world: sw.World, mine: nn.Module) -> tuple[float, float]:
        with sw.shard(mine, {"preset": "zero3", "accumulate": MICRO_BATCHES}, world=world) as engine:
            return engine.eval_step((x, y)).item(), engine.eval_step((x, y)).item()

    models = [copy.deepcopy(model) for _ in range(2)]
    for told in run_ranks(2, lambda world: rank(world, models[world.rank])):
        assert told == pytest.approx((expected, expected), rel=1e-6)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ((torch.zeros(5, LENGTH, dtype=torch.long),) * 2, ConfigError, "5 rows, which cannot be split into 2"),
        ([(1, 2)], ConfigError, "has 1 micro-batches, but the plan's accumulate is 2"),
        ({"x": 1}, ConfigError, "has no tensor that could be split.*Give tensors whose first dimension is the samples"),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any, error: type[Exception], words: str) -> None:
    def rank(world: sw.World) -> None:
        with (
            sw.shard(Transformer(), {"preset": "ddp", "accumulate": 2}, world=world) as engine,
            pytest.raises(error, match=words),
        ):
            engine.train_step(batch)

    run_ranks(1, rank)


def test_what_is_no_loss_is_refused_and_so_is_a_step_in_the_middle_of_another() -> None:
    def rank(world: sw.World) -> None:
        model = Logits()
        plan = {"preset": "ddp", "accumulate": 2}
        with sw.shard(model, plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world) as engine:
            x, y = rows_of(0)[0]
            with pytest.raises(ModelError, match=r"The model returns a tensor of shape \[2, 6, 67\]"):
                engine.train_step(x)
            with pytest.raises(ModelError, match="loss_fn returns list"):
                engine.train_step(x, loss_fn=lambda logits: [logits])
            engine.backward(cross_entropy(engine(x), y))
            with pytest.raises(StateError, match=r"engine\.backward\(\) has been called for some"):
                engine.train_step(x, y, loss_fn=cross_entropy)

    run_ranks(1, rank)
