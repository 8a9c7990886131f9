"""Ranks are lost in loops that do with gradients what plain ones do: clip them, look at them, change them, or compute
them in a closure. The iteration in which that happens is void, and its gradients are zeros."""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.testing import plant
from tests.ranks.test_lost_ranks import NUM_RANKS, PLANS, DiesAt, Loop, Make, adamw, batches, loss_of, net, race
from tests.ranks.threads_as_members import Killed, ThreadMembership, is_collective, run_members
from tests.thorough import drawn, sampled

Tensor = torch.Tensor
Optimizer = torch.optim.Optimizer


def by_closure(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss

    loss: Any = optimizer.step(closure)  # type: ignore[arg-type]  # a float, to torch
    assert isinstance(loss, Tensor)
    return loss


def with_penalty(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A term of the loss reads every parameter, and its backward does once more."""
    trained = [param for param in model.parameters() if param.requires_grad]
    loss = loss_of(model(x), y) + 0.01 * sum(param.pow(2).sum() for param in trained)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    return loss


def with_gradients(change: Callable[[list[nn.Parameter]], None]) -> Loop:
    def loop(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        change([param for param in model.parameters() if param.requires_grad])
        optimizer.step()
        return loss

    return loop


def clip(params: list[nn.Parameter]) -> None:
    norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
    assert norm.isfinite()


def look_and_change(params: list[nn.Parameter]) -> None:
    """As if each were there, as it is in a plain loop."""
    for param in params:
        assert param.grad is not None
        assert param.grad.clone().isfinite().all()
        param.grad.mul_(0.5).add_(param.detach(), alpha=0.01)


def replace(params: list[nn.Parameter]) -> None:
    for param in params:
        assert param.grad is not None
        param.grad = param.grad.clamp(-0.01, 0.01)


CHANGES = {one.__code__ for one in (clip, look_and_change, replace)}
LOOPS = {
    "closure": by_closure,
    "penalty": with_penalty,
    "clips": with_gradients(clip),
    "changes": with_gradients(look_and_change),
    "replaces": with_gradients(replace),
}


def trained_in(loop: Loop, model: nn.Module, make: Make, **_: Any) -> tuple[list[float], nn.Module]:
    plain = copy.deepcopy(model)
    optimizer = make(plain)
    return [loop(plain, optimizer, x, y).item() for x, y in batches()], plain


class DiesWithGradients:
    """A rank dies in the n-th communication that what it does with gradients makes."""

    def __init__(self, member: int, nth: int) -> None:
        self.member, self.left = member, nth

    def __call__(self, engine: sw.Engine, member: int) -> None:
        if member != self.member:
            return
        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)

        def counted(_: int, __: int, what: str) -> bool:
            running = {frame.f_code for frame, _ in traceback.walk_stack(None)}
            self.left -= is_collective(what) and not running.isdisjoint(CHANGES)
            if self.left <= 0:
                raise Killed
            return False

        membership.plant(partial(plant, counted))


@sampled
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_rank_dies_in_a_plain_loop(loop: str, name: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 3)):
        numbers = random.Random(f"{loop} {name} {seed}")
        dies = DiesAt({numbers.randrange(NUM_RANKS): numbers.randrange(3, 60)})
        given = {
            "loop": LOOPS[loop],
            "alone": partial(trained_in, LOOPS[loop]),
            "shares_memory": numbers.random() < 0.5,
        }
        race(PLANS[name], dies, tmp_path, bound=5e-6, **given)  # type: ignore[arg-type]


@sampled
@pytest.mark.parametrize("nth", [1, 2, 4])
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("loop", ["clips", "changes", "replaces"])
def test_a_rank_dies_where_gradients_are_read(loop: str, name: str, nth: int, tmp_path: Path) -> None:
    dies = DiesWithGradients(nth % NUM_RANKS, nth)
    race(PLANS[name], dies, tmp_path, loop=LOOPS[loop], alone=partial(trained_in, LOOPS[loop]), bound=5e-6)
    assert dies.left <= 0


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_scaler_that_ranks_that_join_would_not_have_is_refused(is_enabled: bool, tmp_path: Path) -> None:
    models = [net() for _ in range(2)]

    def work(world: sw.World, member: int) -> int:
        optimizer = adamw(models[member])
        with sw.shard(models[member], "zero3", optimizer=optimizer, world=world) as engine:
            scaler = torch.amp.GradScaler("cpu", enabled=is_enabled)
            scaler.scale(loss_of(engine.module(torch.ones(2, 16)), torch.ones(2, 8))).backward()
            with pytest.raises(ConfigError, match="precision: fp16") if is_enabled else nullcontext():
                scaler.step(optimizer)
            return engine.num_steps

    num_steps = 0 if is_enabled else 1
    assert run_members(2, work, tmp_path) == {0: num_steps, 1: num_steps}
