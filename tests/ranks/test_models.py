"""Models as people write them: outputs of any shape, buffers, frozen and unusual parameters, use of inner weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twins import Batch, adamw, assert_same, batches, full_params, plain_run, sharded_run, train

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.models import Hidden, Transformer
from tests.ranks.twins import assert_alike, ranks_run, sgd
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
PRESETS = ["ddp", "zero1", "zero2", "zero3", "zero3-kept"]
pytestmark = [sampled, pytest.mark.parametrize("preset", PRESETS)]


@dataclass
class Answer:
    hidden: Tensor
    note: str


class Plain:
    """An object of an unknown type that keeps its tensors in attributes."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


SHAPES: dict[str, Any] = {
    "tuple": (lambda h: (h, None), lambda o: o[0]),
    "dict": (lambda h: {"hidden": h, "n": 3}, lambda o: o["hidden"]),
    "nested": (lambda h: [{"a": (h,)}], lambda o: o[0]["a"][0]),
    "dataclass": (lambda h: Answer(h, "x"), lambda o: o.hidden),
    "object": (Plain, lambda o: o.hidden),
    "opaque": (Hidden, lambda o: o.get()),
}


class Wrapping(nn.Module):
    def __init__(self, block: nn.Module, shape: str) -> None:
        super().__init__()
        self.block = block
        self.wrap = SHAPES[shape][0]

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.block(x))


class WithOutputs(Transformer):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.unwrap = SHAPES[shape][1]
        self.blocks = nn.ModuleList(Wrapping(block, shape) for block in self.blocks)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = self.unwrap(block(hidden))
        return self.head(self.norm(hidden))


def race(model: nn.Module, preset: str, *, num_ranks: int = 2, num_steps: int = 5, **options: Any) -> None:
    data = batches(num_steps)
    assert_same(sharded_run(model, data, preset, num_ranks, None, **options), plain_run(model, data))


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_of_any_shape(preset: str, shape: str) -> None:
    race(WithOutputs(shape), preset)


class Reaching(Transformer):
    """Uses weights of large modules without calling these modules."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(600, 32)
        self.mix = nn.Linear(32, 600, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.table.weight[x] + self.positions.weight[: x.shape[1]]
        for index, block in enumerate(self.blocks):
            hidden = block(hidden) + self.blocks[index - 1].down.bias
        hidden = hidden + F.linear(F.linear(hidden, self.mix.weight), self.mix.weight.t()).tanh()
        return self.head(self.norm(hidden))


def test_modules_that_others_reach_into(preset: str) -> None:
    race(Reaching(), preset, num_steps=6)


class Graph(Transformer):
    """Multiplies with a sparse matrix that it is called with, as graph networks do."""

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        edges = torch.eye(x.shape[1]).roll(1, 0).to_sparse()
        for block in self.blocks:
            hidden = block(hidden) + torch.stack([torch.sparse.mm(edges, one) for one in hidden])
        return self.head(self.norm(hidden))


def test_sparse_matrices_in_a_forward(preset: str) -> None:
    race(Graph(), preset, num_steps=4)


class Odd(Transformer):
    """Frozen, unused, scalar, non-contiguous and integer parameters, and one that is used everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.turned = nn.Parameter(torch.randn(32, 8).mul_(0.1).t())
        self.unused = nn.Linear(16, 16)
        self.steps = nn.Parameter(torch.arange(3), requires_grad=False)
        for param in self.blocks[1].parameters():
            param.requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_(False)
        self.tokens.weight.requires_grad_(False)

    def logits(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x) * self.scale + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden) * self.scale
        hidden = hidden + (hidden @ self.turned.t()) @ self.turned
        return self.head(self.norm(hidden))


def test_odd_parameters(preset: str) -> None:
    model = Odd()
    race(model, preset, num_steps=6)


def test_parameters_that_are_used_now_and_then(preset: str) -> None:
    """Every other step skips a block. Its parameters do not change then, not even by weight decay."""

    class Skipping(Transformer):
        count = 0

        def logits(self, x: Tensor) -> Tensor:
            hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
            for index, block in enumerate(self.blocks):
                if index != 1 or self.count % 2 == 0:
                    hidden = block(hidden)
            self.count += 1
            return self.head(self.norm(hidden))

    torch.manual_seed(0)
    race(Skipping(), preset, num_steps=7)


def test_experts_that_only_some_ranks_use(preset: str) -> None:
    """Each rank may use other parameters of a unit. All ranks reduce all of them, in the same order."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
            self.chosen = torch.empty(0)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = self.chosen == index
                if rows.any():
                    out[rows] = expert(x[rows])
            return x + out

    class Mixture(Transformer):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = Experts()
            self.blocks = nn.ModuleList([nn.Sequential(block, Experts()) for block in self.blocks])

        def logits(self, x: Tensor) -> Tensor:
            hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
            for depth, block in enumerate(self.blocks):
                block[1].chosen = (x.sum(1) + depth) % 4  # from integers, without rounding
                hidden = block(hidden)
            return self.head(self.norm(hidden))

    torch.manual_seed(0)
    model = Mixture()
    data = batches(6, rows=4)
    assert_same(sharded_run(model, data, preset, 2, None, units={"class": "Sequential"}), plain_run(model, data))


def test_buffers_follow_rank_0(preset: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    torch.manual_seed(0)
    replicas = [Normed() for _ in range(2)]
    numbers = torch.randn(5, 2, 6, 8)

    def rank(world: sw.World) -> list[Tensor]:
        model = replicas[world.rank]
        engine = sw.shard(model, preset, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), world=world)
        for step in numbers:
            engine.backward(engine(step[world.rank]))
            engine.step()
        return [buffer.clone() for buffer in model.buffers()]

    one, two = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert one[0].abs().sum() > 0
    assert int(one[2]) == 5


def test_all_ranks_start_from_rank_0s_values(preset: str) -> None:
    replicas = []
    for seed in range(3):
        torch.manual_seed(seed)
        replicas.append(Transformer())
    first = {name: param.detach().clone() for name, param in replicas[0].named_parameters()}

    def rank(world: sw.World) -> dict[str, Tensor]:
        return full_params(sw.shard(replicas[world.rank], preset, world=world))

    for params in run_ranks(3, rank):
        assert all(torch.equal(params[name], value) for name, value in first.items())


def test_different_models_are_refused_by_name(preset: str) -> None:
    def rank(world: sw.World) -> str:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4 + world.rank))
        with pytest.raises(ModelError) as caught:
            sw.shard(model, preset, world=world)
        return str(caught.value)

    for message in run_ranks(2, rank):
        assert "1.weight [4, 4]" in message
        assert "rank 1 has 1.weight [5, 4]" in message


def test_a_model_without_blocks(preset: str) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 5))
            self.bias = nn.Parameter(torch.zeros(7))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias).square().mean()

    torch.manual_seed(0)
    model, data = Bare(), [(x,) for x in torch.randn(4, 6, 5)]
    twin = plain_run(model, data, sgd)
    for run in ranks_run(model, data, {"preset": preset, "mesh": {"dp": 3}}, sgd):
        assert_alike(run, twin)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_was_initialised_in_place_is_read_from_elsewhere(preset: str) -> None:
    """A parameter was changed in place before `shard`. If the model's own forward uses its unit, this must not count as
    a write in that forward."""
    model, data = Transformer(), batches(3)
    twin = plain_run(model, data)
    replicas = [copy.deepcopy(model) for _ in range(2)]
    with torch.no_grad():
        for replica in replicas:
            replica.positions.weight.add_(0.0)  # the version counter of a copy starts anew

    def rank(world: sw.World) -> list[float]:
        replica = replicas[world.rank]
        plan = {"preset": preset, "units": ["tokens", "positions", "blocks.*", "head"]}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
            return train(engine, data)

    assert run_ranks(2, rank)[0] == pytest.approx(twin.losses, abs=1e-5)


@pytest.mark.parametrize(
    "units",
    [["blocks.*", "tokens"], {"class": "Block"}, {"class": "Linear"}, {"min_numel": 4000}, ["blocks"]],
    ids=["names", "class", "linears", "size", "one"],
)
def test_units_as_the_plan_wants_them(preset: str, units: Any) -> None:
    race(Transformer(tied=True), preset, units=units)


def test_methods_beside_forward(preset: str) -> None:
    """A block called directly, without the model's forward, gathers its parameters."""
    model = Transformer()
    x, y = batches(1)[0]
    with torch.no_grad():
        expected = model.logits(x)

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        return loss

    def after(engine: sw.Engine) -> dict[str, Any]:
        with torch.no_grad():
            return {"blocks": engine.module.blocks[0](torch.ones(1, 6, 32))}

    run = sharded_run(model, [(x, y)], preset, 2, None, step=step, after=after)
    with torch.no_grad():
        assert torch.allclose(run.extra["blocks"], model.blocks[0](torch.ones(1, 6, 32)), atol=1e-6)
    assert expected.shape[-1] == 67
