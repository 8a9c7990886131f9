"""A plan that says no precision: every parameter computes in its own dtype, as in the plain loop."""

from __future__ import annotations

import copy
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from twins import plain_run, sgd

import shardwise as sw
from shardwise.testing import run_ranks
from tests.thorough import sampled

PRESETS = ["ddp", "zero1", "zero2", "zero3", "zero3-offload"]
SETTINGS = [{"preset": preset} for preset in PRESETS] + [{"preset": "hsdp", "mesh": {"node": 1, "local": 2}}]
Tensor = torch.Tensor


class Mixed(nn.Module):
    """An fp32 model with one layer in another dtype, which casts where they meet."""

    def __init__(self, inner: torch.dtype, *, frozen: bool = False) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), nn.Linear(8, 8).to(inner), nn.Linear(8, 2)
        self.inner.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(self.inner(hidden.to(self.inner.weight.dtype)).to(hidden.dtype))


def uniform(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def data(dtype: torch.dtype) -> Tensor:
    return torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def plain(model: nn.Module, batches: Tensor) -> dict[str, Tensor]:
    return plain_run(model, list(batches), sgd, forward=loss_of, whole_state=True).params


def trained(model: nn.Module, batches: Tensor, plan: dict[str, object]) -> tuple[sw.Plan, dict[str, Tensor]]:
    models = [copy.deepcopy(model) for _ in range(2)]

    def of_rank(world: sw.World) -> tuple[sw.Plan, dict[str, Tensor]]:
        mine = models[world.rank]
        dtypes = [param.dtype for param in mine.parameters()]
        engine = sw.shard(mine, plan, optimizer=sgd(mine), world=world)
        assert [param.dtype for param in mine.parameters()] == dtypes
        for x in batches:
            engine.backward(loss_of(mine, x[2 * world.rank : 2 * world.rank + 2]))
            engine.step()
        return engine.plan, engine.state_dict()

    return run_ranks(2, of_rank)[0]


def largest_error(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((state[name].double() - value.double()).abs().max()) for name, value in wanted.items())


@sampled
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: one["preset"])
def test_a_float64_model_computes_in_float64(settings: dict[str, object]) -> None:
    model, batches = uniform(torch.float64), data(torch.float64)
    plan, state = trained(model, batches, settings)
    assert plan.precision == "fp64"
    assert plan.origin("precision") == "model"
    assert {value.dtype for value in state.values()} == {torch.float64}
    assert largest_error(state, plain(model, batches)) < 1e-14


@sampled
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda one: one["preset"])
def test_one_layer_in_float64_stays_there(settings: dict[str, object]) -> None:
    model, batches = Mixed(torch.float64), data(torch.float32)
    _, state = trained(model, batches, settings)
    assert state["inner.weight"].dtype == torch.float64
    assert state["first.weight"].dtype == torch.float32
    assert largest_error(state, plain(model, batches)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_one_narrow_layer_stays_narrow(dtype: torch.dtype, frozen: bool) -> None:
    """Where it is trained, its master weights are in fp32, so that the result is at least as exact as the plain one."""
    model, batches = Mixed(dtype, frozen=frozen), data(torch.float32)
    wanted = plain(model, batches)
    _, state = trained(model, batches, {"preset": "zero3"})
    assert state["inner.weight"].dtype == (dtype if frozen else torch.float32)
    assert largest_error(state, wanted) < (1e-6 if frozen else 4 * torch.finfo(dtype).eps)


def test_a_rule_and_a_plan_may_say_another_precision() -> None:
    model = Mixed(torch.float64)

    def dtypes(plan: dict[str, object]) -> list[torch.dtype]:
        mine = copy.deepcopy(model)

        def of_rank(world: sw.World) -> list[torch.dtype]:
            sw.shard(mine, plan, world=world)
            return [mine.first.weight.dtype, mine.inner.weight.dtype]

        return run_ranks(1, of_rank)[0]

    rules = {"inner": {"params": ["inner.*"], "precision": "bf16"}}
    assert dtypes({"preset": "zero3", "precision": "fp32"}) == [torch.float32, torch.float32]
    assert dtypes({"preset": "zero3", "rules": rules}) == [torch.float32, torch.bfloat16]
    assert dtypes({"preset": "zero3", "rules": {"inner": {"params": ["inner.*"], "max_numel": 10**6}}}) == [
        torch.float32,
        torch.float64,
    ]


def test_another_plan_keeps_the_models_precision() -> None:
    model = uniform(torch.float64)

    def of_rank(world: sw.World) -> list[str]:
        engine = sw.shard(model, "zero3", world=world)
        found = [engine.plan.precision]
        for plan in ({"preset": "ddp"}, {"preset": "ddp", "precision": "fp32"}):
            engine.reshard(plan)
            found.append(engine.plan.precision)
        return found

    assert run_ranks(1, of_rank) == [["fp64", "fp64", "fp32"]]


class Pair(NamedTuple):
    x: Tensor
    name: str


@dataclass(frozen=True)
class Batch:
    x: Tensor
    pair: Pair
    rows: int = field(init=False)  # never set


class OfBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, batch: Batch, others: UserDict[str, Any], notes: dict[str, Any]) -> Tensor:
        notes["calls"] += 1
        self.dtypes = [batch.x.dtype, batch.pair.x.dtype, others["x"].dtype, others["ids"].dtype]
        return (self.linear(batch.x) + self.linear(batch.pair.x) + self.linear(others["x"])).square().mean()


def test_inputs_are_cast_wherever_they_are() -> None:
    """In dataclasses and mappings of other libraries too, which are not changed; what has none is the loop's own."""
    x = torch.ones(2, 4)

    def rank(world: sw.World) -> tuple[list[torch.dtype], int]:
        model = OfBatch()
        with sw.shard(model, {"preset": "ddp", "precision": "bf16"}, world=world) as engine:
            notes, others = {"calls": 0, "steps": [1, 2]}, UserDict({"x": x, "ids": torch.arange(2)})
            engine.backward(model(Batch(x, Pair(x, "pair")), others, notes))
            assert others["x"] is x
            return model.dtypes, notes["calls"]

    half = torch.bfloat16
    assert run_ranks(2, rank) == [([half, half, half, torch.int64], 1)] * 2
