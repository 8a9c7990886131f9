"""Optimizers of other libraries: each of those in the table of docs/optimizers.md trains as in a plain loop, or is
refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes
import dadaptation
import lion_pytorch
import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

Tensor = torch.Tensor
Make = Callable[[Any], Any]
NUM_STEPS = 4
PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
EVERYWHERE = [("ddp", 2), ("zero1", 3), ("zero2", 2), ("zero3", 3), ("offload", 2), ("zero3-offload", 2)]


def low_rank(kind: Any, **settings: Any) -> Make:
    """With one group of matrices that are projected to few dimensions, and one of the other parameters."""

    def make(params: Any) -> Any:
        every = list(params)
        return kind(
            [
                {"params": [one for one in every if one.dim() == 2], "rank": 4, "update_proj_gap": 2, **settings},
                {"params": [one for one in every if one.dim() != 2]},
            ]
        )

    return make


ELEMENTWISE: dict[str, Make] = {
    "Adan": lambda params: pytorch_optimizer.Adan(params, lr=1e-3),
    "AdaBelief": lambda params: pytorch_optimizer.AdaBelief(params, lr=1e-3),
    "AdEMAMix": lambda params: pytorch_optimizer.AdEMAMix(params, lr=1e-3),
    "ADOPT": lambda params: pytorch_optimizer.ADOPT(params, lr=1e-3),
    "Lion": lambda params: pytorch_optimizer.Lion(params, lr=1e-3),
    "Lion of lion_pytorch": lambda params: lion_pytorch.Lion(params, lr=1e-3),
    "Tiger": lambda params: pytorch_optimizer.Tiger(params, lr=1e-3),
    "GaLore without a rank": lambda params: pytorch_optimizer.GaLore(params, lr=1e-3),
}
SCHEDULE_FREE: dict[str, Make] = {
    "SGDScheduleFree": lambda params: schedulefree.SGDScheduleFree(params, lr=0.1, warmup_steps=2),
    "AdamWScheduleFree": lambda params: schedulefree.AdamWScheduleFree(params, lr=1e-2, warmup_steps=2),
    "RAdamScheduleFree": lambda params: schedulefree.RAdamScheduleFree(params, lr=1e-2),
    "ScheduleFreeAdamW": lambda params: pytorch_optimizer.ScheduleFreeAdamW(params, lr=1e-2),
}
WHOLE: dict[str, Make] = {
    "Prodigy": lambda params: prodigyopt.Prodigy(params, d0=1e-3),
    "Prodigy of pytorch_optimizer": lambda params: pytorch_optimizer.Prodigy(params, d0=1e-3),
    "DAdaptAdam": lambda params: dadaptation.DAdaptAdam(params, d0=1e-3),
    "DAdaptSGD": lambda params: dadaptation.DAdaptSGD(params, d0=1e-3),
    "LARS": lambda params: pytorch_optimizer.LARS(params, lr=1e-2),
    "Lamb": lambda params: pytorch_optimizer.Lamb(params, lr=1e-2),
    "Shampoo": lambda params: pytorch_optimizer.Shampoo(params, lr=1e-2),
    "AdamP": lambda params: pytorch_optimizer.AdamP(params, lr=1e-3),
    "SGDP": lambda params: pytorch_optimizer.SGDP(params, lr=1e-2),
    "CAME": lambda params: pytorch_optimizer.CAME(params, lr=1e-3),
    "Adan with a clip": lambda params: pytorch_optimizer.Adan(params, lr=1e-3, max_grad_norm=0.1),
    "Ranger": lambda params: pytorch_optimizer.Ranger(params, lr=1e-3),
    "StableAdamW": lambda params: pytorch_optimizer.StableAdamW(params, lr=1e-3),
    "AdamW8bit": lambda params: bitsandbytes.optim.AdamW8bit(params, lr=1e-3),
}
REFUSED: dict[str, tuple[Make, str]] = {
    "SophiaH": (lambda params: pytorch_optimizer.SophiaH(params), "draws random numbers"),
    "SOAP": (lambda params: pytorch_optimizer.SOAP(params), "keeps its state GG as a list"),
    "ScalableShampoo": (lambda params: pytorch_optimizer.ScalableShampoo(params), "as a PreConditioner"),
    "GaLore": (
        low_rank(pytorch_optimizer.GaLore, scale=1.0, projection_type="std"),
        "keeps its state|draws random numbers",
    ),
    "APOLLO": (
        low_rank(pytorch_optimizer.APOLLO, scale=1.0, projection_type="std"),
        "keeps its state|draws random numbers",
    ),
    "MADGRAD": (lambda params: pytorch_optimizer.MADGRAD(params), "a state 'k' for no parameter"),
    "AggMo": (lambda params: pytorch_optimizer.AggMo(params), "keeps its state momentum_buffer as a dict"),
    "Lookahead": (
        lambda params: pytorch_optimizer.Lookahead(torch.optim.SGD(params, lr=0.1)),
        "wraps another optimizer",
    ),
    "SAM": (
        lambda params: pytorch_optimizer.SAM(params, torch.optim.SGD, lr=0.1),
        "wraps another optimizer",
    ),
    "AdamWScheduleFreeClosure": (
        lambda params: schedulefree.AdamWScheduleFreeClosure(params),
        "evaluates its closure at other parameters",
    ),
    "RAdamScheduleFreeClosure": (
        lambda params: schedulefree.RAdamScheduleFreeClosure(params),
        "evaluates its closure at other parameters",
    ),
    "EmoNavi": (lambda params: pytorch_optimizer.EmoNavi(params), "reads the loss"),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 80, bias=False), nn.Tanh(), nn.Linear(80, 5)
    )


def data() -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 3, 8, generator=numbers), torch.randn(6, 5, generator=numbers)) for _ in range(NUM_STEPS)]


def plain(make: Make, num_ranks: int, *, switches: bool) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    """Parameters, losses at the points of evaluation, and the optimizer's state."""
    model = net()
    optimizer, losses = make(model.parameters()), []
    if switches:
        optimizer.train()
    for x, y in data():
        for part, target in zip(x.chunk(num_ranks), y.chunk(num_ranks), strict=True):
            ((model(part) - target).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        if switches:
            optimizer.eval()
            losses.append((model(x) - y).square().mean().item())
            optimizer.train()
    return {name: param.detach() for name, param in model.named_parameters()}, losses, optimizer.state_dict()


def sharded(
    make: Make, plan: Any, num_ranks: int, *, switches: bool
) -> tuple[dict[str, Tensor], list[float], dict[str, Any]]:
    models = [net() for _ in range(num_ranks)]

    def rank(world: sw.World) -> Any:
        model = models[world.rank]
        optimizer, losses = make(model.parameters()), []
        if switches:
            optimizer.train()
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for x, y in data():
                part, target = x.chunk(num_ranks)[world.rank], y.chunk(num_ranks)[world.rank]
                engine.backward((model(part) - target).square().mean())
                engine.step()
                if switches:
                    optimizer.eval()
                    with torch.no_grad():
                        losses.append((model(x) - y).square().mean().item())
                    optimizer.train()
            return engine.state_dict(), losses, optimizer.state_dict()

    return run_ranks(num_ranks, rank)[0]


def race(make: Make, preset: str, num_ranks: int, *, switches: bool = False) -> None:
    params, losses, state = plain(make, num_ranks, switches=switches)
    own_params, own_losses, own_state = sharded(make, preset, num_ranks, switches=switches)
    assert own_losses == pytest.approx(losses, rel=1e-4)
    for name, param in params.items():
        assert torch.allclose(own_params[name], param, rtol=1e-4, atol=1e-5), name
    for number, kept in state["state"].items():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                own = own_state["state"][number][key]
                assert own.shape == value.shape, (number, key)
                apart = (own.double() - value.double()).norm()  # inverse roots of matrices differ by more than rounding
                assert apart <= 0.1 * value.double().norm() + 1e-4, (number, key)


@pytest.mark.parametrize(("preset", "num_ranks"), EVERYWHERE)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_ones_train_sharded_as_in_a_plain_loop(name: str, preset: str, num_ranks: int) -> None:
    race(ELEMENTWISE[name], preset, num_ranks)


@pytest.mark.parametrize(("preset", "num_ranks"), EVERYWHERE)
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_ones_train_and_evaluate_as_in_a_plain_loop(name: str, preset: str, num_ranks: int) -> None:
    race(SCHEDULE_FREE[name], preset, num_ranks, switches=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", WHOLE)
def test_others_train_where_parameters_are_whole(name: str, num_ranks: int) -> None:
    race(WHOLE[name], "ddp", num_ranks)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("name", WHOLE)
def test_others_are_refused_where_parameters_are_cut(name: str, preset: str) -> None:
    models = [net() for _ in range(2)]

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with pytest.raises(ModelError, match=r"is not elementwise.*works as it is where each rank updates whole"):
            sw.shard(model, preset, optimizer=WHOLE[name](model.parameters()), world=world)

    run_ranks(2, rank)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rank_can_use_is_refused_under_any_plan(name: str) -> None:
    make, words = REFUSED[name]
    model = net()
    with pytest.raises(ModelError, match=words):
        sw.shard(model, "ddp", optimizer=make(model.parameters()))


def test_the_page_has_a_row_for_each() -> None:
    page = PAGE.read_text()
    for name in [*ELEMENTWISE, *SCHEDULE_FREE, *WHOLE, *REFUSED]:
        assert re.search(rf"\b{name.split(' ')[0]}\b", page), name
