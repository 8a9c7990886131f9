"""Micro-batches end in `engine.step()`, however often and by whom backward is called; what loops derive from tokens and
gradients follows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import PRESETS_2X2, normal_batches, plan_of, work_on_ranks

import shardwise as sw
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor]
Backward = Callable[[sw.Engine, Tensor, Tensor], None]
NUM_MICRO, NUM_STEPS, LR = 3, 2, 0.1
PLANS: list[tuple[str, int, Any]] = [
    *[(preset, 2, None) for preset in ("ddp", "zero1", "zero2", "zero3", "zero3-kept", "offload")],
    ("zero2", 3, None),
    *PRESETS_2X2[:2],
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def batches(num_ranks: int) -> list[Batch]:
    rows = 2 * num_ranks
    return normal_batches(NUM_STEPS * NUM_MICRO, (rows, 6), (rows, 4))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LR, momentum=0.9)


def plain(data: Sequence[Batch], *, lasts: Sequence[int] = (NUM_MICRO - 1, 2 * NUM_MICRO - 1)) -> dict[str, Tensor]:
    module = model()
    optimizer = sgd(module)
    for number, (x, y) in enumerate(data):
        (F.mse_loss(module(x), y) / NUM_MICRO).backward()
        if number in lasts:
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict()


def by_engine(engine: sw.Engine, x: Tensor, y: Tensor) -> None:
    engine.backward(F.mse_loss(engine(x), y))


def by_loss(engine: sw.Engine, x: Tensor, y: Tensor) -> None:
    """As in plain PyTorch: the loop divides."""
    (F.mse_loss(engine(x), y) / NUM_MICRO).backward()


def by_scale(engine: sw.Engine, x: Tensor, y: Tensor) -> None:
    engine.scale(F.mse_loss(engine(x), y) / NUM_MICRO).backward()


def by_halves(engine: sw.Engine, x: Tensor, y: Tensor) -> None:
    """As for real and generated samples of a GAN."""
    for part in (slice(0, 1), slice(1, 2)):
        engine.backward(F.mse_loss(engine(x[part]), y[part]) / 2)


def by_autograd(engine: sw.Engine, x: Tensor, y: Tensor) -> None:
    loss = F.mse_loss(engine(x), y) / NUM_MICRO
    torch.autograd.backward(loss / 2, retain_graph=True)
    torch.autograd.backward(loss / 2)


@sampled
@pytest.mark.parametrize("backward", [by_engine, by_loss, by_scale, by_halves, by_autograd])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), PLANS)
def test_any_backward_is_averaged_and_only_step_counts(
    backward: Backward, preset: str, num_ranks: int, mesh: Any
) -> None:
    data = batches(num_ranks)
    plan = plan_of(preset, mesh, accumulate=NUM_MICRO)

    def work(engine: sw.Engine) -> tuple[list[bool], dict[str, Tensor]]:
        updated = []
        for x, y in data:
            backward(engine, x.chunk(num_ranks)[engine.world.rank], y.chunk(num_ranks)[engine.world.rank])
            updated.append(engine.step() is not None)
        assert engine.num_steps == NUM_STEPS
        return updated, engine.state_dict()

    expected = plain(data)
    for updated, params in work_on_ranks(num_ranks, work, plan, model, sgd):
        assert updated == [False, False, True] * NUM_STEPS
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
@pytest.mark.parametrize("divides_all", [False, True])
def test_a_loss_that_runs_through_two_engines(preset: str, divides_all: bool) -> None:
    """What reaches either is divided once, though only one has seen the loss."""
    data = batches(2)
    torch.manual_seed(3)
    front = nn.Linear(6, 6)
    replicas = [(copy.deepcopy(front), model()) for _ in range(2)]

    def rank(world: sw.World) -> list[dict[str, Tensor]]:
        first, second = replicas[world.rank]
        plan = {"preset": preset, "accumulate": NUM_MICRO}
        with (
            sw.shard(first, plan, optimizer=sgd(first), world=world) as one,
            sw.shard(second, plan, optimizer=sgd(second), world=world) as other,
        ):
            if divides_all:
                one.divide_every_backward()
                other.divide_every_backward()
            for x, y in data:
                part = slice(2 * world.rank, 2 * world.rank + 2)
                other.backward(F.mse_loss(other(one(x[part])), y[part]))
                one.step()
                other.step()
            return [one.state_dict(), other.state_dict()]

    twins = [copy.deepcopy(front), model()]
    optimizers = [sgd(twin) for twin in twins]
    for number, (x, y) in enumerate(data):
        (F.mse_loss(twins[1](twins[0](x)), y) / NUM_MICRO).backward()
        if number % NUM_MICRO == NUM_MICRO - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for states in run_ranks(2, rank):
        for state, twin in zip(states, twins, strict=True):
            for name, value in twin.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_a_step_may_end_earlier_or_later(preset: str) -> None:
    """With 2 and 4 micro-batches in the place of 3 and 3; each loss counts a third."""
    data, lasts = batches(2), (1, 5)
    plan = {"preset": preset, "accumulate": NUM_MICRO}

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        for number, (x, y) in enumerate(data):
            by_engine(engine, x.chunk(2)[engine.world.rank], y.chunk(2)[engine.world.rank])
            assert (engine.step(is_last=number in lasts) is not None) == (number in lasts)
        return engine.state_dict()

    expected = plain(data, lasts=lasts)
    for params in work_on_ranks(2, work, plan, model, sgd):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_every_backward_is_divided_if_it_is_asked_for(preset: str) -> None:
    data = batches(2)
    plan = {"preset": preset, "accumulate": NUM_MICRO}

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        engine.divide_every_backward()
        for number, (x, y) in enumerate(data):
            loss = F.mse_loss(engine(x.chunk(2)[engine.world.rank]), y.chunk(2)[engine.world.rank])
            loss.backward() if number % 2 else engine.backward(loss)
            engine.step()
        return engine.state_dict()

    expected = plain(data)
    for params in work_on_ranks(2, work, plan, model, sgd):
        for name, value in expected.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("num_backwards", "by_engine_", "words"), [(1, False, "has to divide its loss"), (2, True, "is_last=True")]
)
def test_what_a_loop_may_have_meant_otherwise_is_said_once(
    num_backwards: int, by_engine_: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = batches(1)[0]
    with sw.World.join(environment={}) as world:
        mine = model()
        with sw.shard(mine, {"accumulate": 2}, optimizer=sgd(mine), world=world) as engine:
            for _ in range(4):
                for _ in range(num_backwards):
                    (by_engine if by_engine_ else by_loss)(engine, x, y)
                engine.step()
    assert caplog.text.count(words) == 1


def test_what_was_begun_is_not_mixed_with_whole_steps() -> None:
    with sw.World.join(environment={}) as world:
        mine = model()
        with sw.shard(mine, {"accumulate": 2}, optimizer=sgd(mine), world=world) as engine:
            x, y = batches(1)[0]
            by_engine(engine, x, y)
            with pytest.raises(sw.ShardwiseError, match="runs all micro-batches"):
                engine.train_step((x,), y, loss_fn=F.mse_loss)
            engine.zero_grad()
            engine.train_step((x,), y, loss_fn=F.mse_loss)
            assert engine.num_steps == 1
            by_loss(engine, x, y)
            assert engine.step() is None


# -- means over tokens ----------------------------------------------------------------------------------

COUNTS = [(1, 5), (0, 4), (3, 3)]


def race_of_means(
    num_ranks: int, preset: str, loss_of: Callable[[sw.Engine], Tensor], twins: Callable[[Any], Tensor]
) -> None:
    """Each rank's loss is a mean over the tokens of all, `twins` that of the plain model."""

    def work(engine: sw.Engine) -> tuple[float, dict[str, Tensor | None]]:
        loss = loss_of(engine)
        engine.backward(loss)
        names = [name for name, _ in engine.module.named_parameters()]
        return engine.mean(loss.item()), {name: engine.get(name, "grad") for name in names}

    twin = model()
    expected = twins(twin)
    expected.backward()
    for loss, grads in work_on_ranks(num_ranks, work, preset, model, sgd):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for name, param in twin.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-7)


@sampled
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_means_over_tokens_are_those_of_all_ranks(preset: str, counts: tuple[int, int], num_ranks: int) -> None:
    """A rank without a counted token contributes nothing, and no nan."""
    numbers = torch.Generator().manual_seed(4)
    x, y = torch.randn(num_ranks, 6, 6, generator=numbers), torch.randint(0, 4, (num_ranks, 6), generator=numbers)
    counted = torch.zeros(num_ranks, 6, dtype=torch.bool)
    for row, number in enumerate((*counts, 2)[:num_ranks]):
        counted[row, :number] = True

    def loss_of(engine: sw.Engine) -> Tensor:
        own = engine.world.rank
        losses = F.cross_entropy(engine(x[own]), y[own], reduction="none")
        return engine.mean_over_tokens(losses, counted[own])

    race_of_means(num_ranks, preset, loss_of, lambda twin: F.cross_entropy(twin(x[counted]), y[counted]))


def test_means_over_tokens_where_ranks_have_other_numbers_of_samples() -> None:
    """Weights by samples are for means over samples; a mean over tokens has counted them already."""
    numbers = torch.Generator().manual_seed(4)
    x, y = torch.randn(4, 6, generator=numbers), torch.randint(0, 4, (4,), generator=numbers)
    shares = [slice(0, 1), slice(1, 4)]

    def loss_of(engine: sw.Engine) -> Tensor:
        own = shares[engine.world.rank]
        engine.weigh(own.stop - own.start, of=4)
        return engine.mean_over_tokens(F.cross_entropy(engine(x[own]), y[own], reduction="none"))

    race_of_means(2, "zero2", loss_of, lambda twin: F.cross_entropy(twin(x), y))


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_means_over_tokens_beside_a_rank_without_samples(preset: str) -> None:
    """Its row stands in for none, and so do its tokens."""
    x, y = batches(1)[0][0], torch.tensor([1, 2])

    def loss_of(engine: sw.Engine) -> Tensor:
        own = slice(engine.world.rank, engine.world.rank + 1)
        engine.weigh(engine.world.rank, of=1)
        return engine.mean_over_tokens(F.cross_entropy(engine(x[own]), y[own], reduction="none"))

    race_of_means(2, preset, loss_of, lambda twin: F.cross_entropy(twin(x[1:]), y[1:]))


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_means_over_tokens_in_micro_batches_of_one_call(preset: str) -> None:
    """Each with its own shares of rows, not with those announced last."""
    data = [(x, torch.arange(4)) for x, _ in batches(2)[:2]]
    shares = [(1, 3), (3, 1)]

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        inputs, targets = [], []
        for (x, y), share in zip(data, shares, strict=True):
            engine.weigh(share[engine.world.rank], of=4)
            inputs.append(x.split(share)[engine.world.rank])
            targets.append(y.split(share)[engine.world.rank])

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return engine.mean_over_tokens(F.cross_entropy(output, target, reduction="none"))

        engine.train_step(inputs, targets, loss_fn=loss_fn)
        return engine.state_dict()

    twin = model()
    optimizer = sgd(twin)
    for x, y in data:
        (F.cross_entropy(twin(x), y) / 2).backward()
    optimizer.step()
    for params in work_on_ranks(2, work, {"preset": preset, "accumulate": 2}, model, sgd):
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("preset", ["ddp", "zero3"])
@pytest.mark.parametrize("shares", [(1, 1), (1, 3), (2, 3), (0, 1)])
def test_means_over_tokens_of_a_batch_that_micro_batches_share_unevenly(shares: tuple[int, int], preset: str) -> None:
    """With a row on each rank the second micro-batch is empty everywhere, and counted as much as the first: the
    gradient was half of what it should be."""
    num = sum(shares)
    x, y = batches(2)[0][0][:1].expand(num, -1) * torch.arange(1.0, num + 1)[:, None], torch.arange(num) % 4

    def work(engine: sw.Engine) -> tuple[float, dict[str, Tensor]]:
        own = slice(0, shares[0]) if not engine.world.rank else slice(shares[0], num)
        rows = own if shares[engine.world.rank] else slice(0, 1)  # it has to run some
        engine.weigh(shares[engine.world.rank], of=num)

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            return engine.mean_over_tokens(F.cross_entropy(output, target, reduction="none"))

        loss = engine.train_step(x[rows], y[rows], loss_fn=loss_fn)
        return engine.mean(loss.item()), engine.state_dict()

    twin = model()
    optimizer = sgd(twin)
    expected = F.cross_entropy(twin(x), y)
    expected.backward()
    optimizer.step()
    for loss, params in work_on_ranks(2, work, {"preset": preset, "accumulate": 2}, model, sgd):
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-6)


# -- what loops are told ---------------------------------------------------------------------------------


def test_a_loop_that_zeroes_gradients_before_each_micro_batch_is_told_that_it_takes_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with sw.World.join(environment={}) as world:
        mine = model()
        optimizer = sgd(mine)
        with sw.shard(mine, {"accumulate": 2}, optimizer=optimizer, world=world) as engine:
            for x, y in batches(1)[:4]:
                optimizer.zero_grad()
                by_engine(engine, x, y)
                assert engine.step() is None
    assert caplog.text.count("so nothing was updated") == 1


# -- gradients that are written -------------------------------------------------------------------------


@sampled
@pytest.mark.parametrize("by_plan", [True, False])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "offload"])
def test_a_gradient_that_was_set_is_clipped_by_its_own_norm(preset: str, by_plan: bool) -> None:
    x = batches(2)[0][0]
    plan = {"preset": preset, **({"clip_grad_norm": 1.0} if by_plan else {})}

    def work(engine: sw.Engine) -> tuple[float, float]:
        before = engine.state_dict()
        engine(x).square().mean().backward()
        for name in before:
            engine.set(name, torch.full_like(before[name], 100.0), "grad")
        seen = 0.0 if by_plan else float(engine.clip_grad_norm_(1.0))
        norm = float(engine.step() or 0.0)
        after = engine.state_dict()
        moved = torch.cat([(after[name] - value).flatten() for name, value in before.items()])
        return moved.norm().item(), norm if by_plan else seen

    numel = sum(param.numel() for param in model().parameters())
    for moved, norm in work_on_ranks(2, work, plan, model, lambda mine: torch.optim.SGD(mine.parameters(), lr=1.0)):
        assert norm == pytest.approx(100.0 * numel**0.5, rel=1e-5)
        assert moved == pytest.approx(1.0, rel=1e-5)


def test_a_number_in_a_batch_belongs_to_every_micro_batch() -> None:
    """Such as `num_items_in_batch` of transformers, as a tensor without dimensions."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: Tensor, items: float | Tensor) -> Tensor:
            loss: Tensor = self.inner(x).square().sum() / items
            return loss

    def rank(world: sw.World) -> list[tuple[float, dict[str, Tensor]]]:
        found = []
        for one, items in ((models[0], 16.0), (models[1], torch.tensor(16.0))):
            with sw.shard(one, {"accumulate": 2}, optimizer=sgd(one), world=world) as engine:
                found.append((float(engine.train_step({"x": torch.ones(4, 6), "items": items})), engine.state_dict()))
        return found

    models = [Divided() for _ in range(2)]
    ((by_number, of_number), (by_tensor, of_tensor)) = run_ranks(1, rank)[0]
    assert by_number == by_tensor
    assert all(torch.equal(one, of_tensor[name]) for name, one in of_number.items())
