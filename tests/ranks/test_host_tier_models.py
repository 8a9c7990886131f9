"""Models and optimizers of all kinds with tensors on the host: frozen parts, parameters without an optimizer, several
optimizers, models that are never whole on one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, batches, engine_step, full_params, plain_run, share_of

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import Transformer
from tests.thorough import sampled

pytestmark = sampled

Optimizers = list[torch.optim.Optimizer]
HOST = {"tier": "host"}
PLANS: dict[str, dict[str, Any]] = {
    "offload": {"preset": "offload"},
    "zero3, all": {"preset": "zero3", "rows": {"param": HOST, "grad": HOST, "optim": HOST}},
    "zero2, all": {"preset": "zero2", "rows": {"param": HOST, "grad": HOST, "optim": HOST}},
    "zero3, half": {"preset": "zero3", "offload": {"optim": 0.5, "param": 0.5}},
}


class Together:
    """Several optimizers that step together, as in a plain loop."""

    def __init__(self, members: Optimizers) -> None:
        self.members = members

    def step(self) -> None:
        for member in self.members:
            member.step()


def plain() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def frozen() -> Transformer:
    model = plain()
    for param in (*model.blocks[1].parameters(), model.tokens.weight):
        param.requires_grad_(False)
    return model


def trained(model: nn.Module) -> Optimizers:
    params = [param for param in model.parameters() if param.requires_grad]
    return [torch.optim.AdamW(params, lr=3e-3, eps=1e-5)]


def blocks_alone(model: nn.Module) -> Optimizers:
    params = [param for name, param in model.named_parameters() if "blocks" in name]
    return [torch.optim.AdamW(params, lr=3e-3, eps=1e-5)]


def two(model: nn.Module) -> Optimizers:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    return [torch.optim.AdamW(matrices, lr=3e-3, eps=1e-5), torch.optim.SGD(others, lr=0.01, momentum=0.9)]


KINDS: dict[str, tuple[Callable[[], Transformer], Callable[[nn.Module], Optimizers]]] = {
    "frozen parts": (frozen, trained),
    "an optimizer of some": (plain, blocks_alone),
    "several optimizers": (plain, two),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_trains_like_the_plain_model(kind: str, plan: dict[str, Any]) -> None:
    build, make_optimizers = KINDS[kind]
    model, data = build(), batches(3)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    expected = plain_run(model, data, lambda twin: Together(make_optimizers(twin)))  # type: ignore[arg-type,return-value]

    def rank(world: sw.World) -> tuple[list[float], dict[str, torch.Tensor]]:
        replica = replicas[world.rank]
        optimizers = make_optimizers(replica)
        with sw.shard(replica, plan, optimizer=optimizers, world=world) as engine:
            losses = [world.mean(engine_step(engine, optimizers[0], share_of(engine, one)).item()) for one in data]
            return losses, full_params(engine)

    for losses, params in run_ranks(2, rank):
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        for name, value in expected.params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_model_that_never_is_whole_is_born_where_its_rows_are(plan: dict[str, Any]) -> None:
    data = batches(2)
    expected = plain_run(plain(), data)
    replicas = []
    for _ in range(2):
        torch.manual_seed(0)
        with sw.deferred_init():
            replicas.append(Transformer())

    def rank(world: sw.World) -> list[float]:
        replica = replicas[world.rank]
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            return [
                world.mean(engine_step(engine, adamw(nn.Linear(1, 1)), share_of(engine, one)).item()) for one in data
            ]

    for losses in run_ranks(2, rank):
        assert losses == pytest.approx(expected.losses, rel=1e-5)
