"""Sums of input gradients beside the products of weight gradients: in which order, and that nothing else changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from split_models import TENSOR, Transformer, tokens
from test_tensor_parallel import assert_equal, plain, seeded, sharded
from torch import nn

import shardwise as sw
from shardwise.comm import Line
from shardwise.tensor import beside, products
from shardwise.testing import run_ranks
from tests.thorough import one_in

pytestmark = one_in(6)

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host collectives can be waited for later as well; there it would only cost time."""
    monkeypatch.setattr(Line, "runs_beside", property(lambda line: line._collectives is not None))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[str]]]:
    """What happened, by thread: sums that start, are waited for, and weights' products."""
    events: dict[int, list[str]] = {}
    start, wait, of_weight = beside.SumBeside.start, beside.SumBeside.wait, products._of_weight

    def note(what: str) -> None:
        events.setdefault(threading.get_ident(), []).append(what)

    def started(self: beside.SumBeside, grad: Tensor) -> Tensor:
        note("start")
        return start(self, grad)

    def waited(self: beside.SumBeside, grad: Tensor) -> Tensor:
        note("wait")
        return wait(self, grad)

    def made(*args: Any, **kwargs: Any) -> Tensor:
        note("weight")
        return of_weight(*args, **kwargs)

    monkeypatch.setattr(beside.SumBeside, "start", started)
    monkeypatch.setattr(beside.SumBeside, "wait", waited)
    monkeypatch.setattr(products, "_of_weight", made)
    return events


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("preset", ["zero3", "ddp"])
@pytest.mark.parametrize("sequence", [False, True])
def test_training_is_that_of_the_unsplit_model(preset: str, sequence: bool, shares_memory: bool) -> None:
    runs = sharded(Transformer, preset, {**TENSOR, "sequence": sequence}, shares_memory=shares_memory)
    assert_equal(runs, plain(seeded(Transformer), 2))


def test_weights_are_made_between_the_start_of_a_sum_and_its_end(order: dict[int, list[str]]) -> None:
    models = [seeded(Transformer) for _ in range(2)]

    def rank(world: sw.World) -> None:
        plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": TENSOR}
        with sw.shard(models[world.rank], plan, world=world) as engine:
            for _ in range(2):
                engine.backward(engine(tokens(0)))

    run_ranks(2, rank)
    for events in order.values():
        told = " ".join(events)
        assert "start weight wait" in told or "start weight weight" in told
        regions = told.split("start ")[1:]
        assert all(region.startswith("weight") and "wait" in region for region in regions), told


class Conv1D(nn.Module):
    """Linear with its weight the other way round, as in GPT-2 of transformers."""

    def __init__(self, num_out: int, num_in: int) -> None:
        super().__init__()
        self.nf, self.nx = num_out, num_in
        self.weight = nn.Parameter(torch.randn(num_in, num_out) / 8)
        self.bias = nn.Parameter(torch.randn(num_out) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Transposed(Transformer):
    """The same with one linear module of each block made of that."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up = Conv1D(block.up.out_features, block.up.in_features)


def test_weights_that_lie_the_other_way_round() -> None:
    assert_equal(sharded(Transposed, "zero2", TENSOR), plain(seeded(Transposed), 2))


def test_a_graph_of_a_backward() -> None:
    """With `create_graph` gradients have gradients of their own, so all is done at once."""
    inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    x = torch.randn(3, 6)

    def penalty(model: nn.Module, given: Tensor) -> Tensor:
        loss = model(given).square().mean()
        [grad] = torch.autograd.grad(loss, [given], create_graph=True)
        return loss + grad.square().sum()

    whole = x.clone().requires_grad_()
    penalty(inner, whole).backward()
    expected = {name: param.grad for name, param in inner.named_parameters()}
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2)]
    for model in models:
        model.load_state_dict(inner.state_dict())

    def rank(world: sw.World) -> dict[str, Tensor | None]:
        model = models[world.rank]
        plan = {"preset": "ddp", "mesh": {"dp": 1, "tp": 2}, "tensor": {"plan": {"0": "column", "2": "row"}}}
        with sw.shard(model, plan, world=world) as engine:
            engine.backward(engine(x.clone()).square().mean())  # after it columns that enter together are known
            engine.zero_grad()
            engine.backward(penalty(engine, x.clone().requires_grad_()))
            return {name: engine.get(name, "grad") for name, _ in model.named_parameters()}

    for grads in run_ranks(2, rank):
        for name, grad in expected.items():
            assert torch.allclose(grads[name], grad, rtol=1e-4, atol=1e-6), name
