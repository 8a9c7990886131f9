"""Models drawn at random, compared with twins: nesting, ties, frozen parts, reuse, reads, skipped layers, experts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import Course, course_of, mean_losses

import shardwise as sw
from shardwise.testing import run_ranks
from tests.thorough import drawn, varies

Tensor = torch.Tensor
WIDTH = 6
NUM_STEPS = 4


class Layer(nn.Module):
    """A layer of one of a few kinds, some with an unusual parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear":
            self.inner: nn.Module = nn.Linear(WIDTH, WIDTH)
        elif kind == "norm":
            self.inner = nn.LayerNorm(WIDTH)
        elif kind == "mlp":
            self.inner = nn.Sequential(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, WIDTH))
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.9))
            self.inner = nn.Identity()
        elif kind == "experts":
            self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])
            self.chosen = 0
        else:
            self.turned = nn.Parameter(torch.randn(3, WIDTH).mul_(0.3).t())
            self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner[self.chosen](x) if self.kind == "experts" else self.inner(x)
        if self.kind == "scalar":
            return out * self.scale
        if self.kind == "turned":
            return out + torch.tanh(out @ self.turned) @ self.turned.t()
        return x + 0.5 * torch.tanh(out)


@dataclass(frozen=True)
class Call:
    """One use of a layer: it is called, or recomputed in the backward (in one of torch's two ways), or only its first
    parameter is read: into a sum, or into a product whose backward reads it again."""

    layer: int
    how: str


@dataclass(frozen=True)
class Sketch:
    kinds: tuple[str, ...]
    nested: tuple[int, ...]
    ties: tuple[tuple[int, int], ...]
    frozen: frozenset[int]
    calls: tuple[Call, ...]
    every_other: frozenset[int]
    frozen_ends: frozenset[str] = frozenset()
    """Which layers outside of all groups are frozen."""


class Drawn(nn.Module):
    def __init__(self, sketch: Sketch) -> None:
        super().__init__()
        self.sketch = sketch
        layers = [Layer(kind) for kind in sketch.kinds]
        for a, b in sketch.ties:
            if {sketch.kinds[a], sketch.kinds[b]} == {"linear"}:
                layers[b].inner.weight = layers[a].inner.weight
        for index in sketch.frozen:
            for param in layers[index].parameters():
                param.requires_grad_(False)
        self.groups = nn.ModuleList()
        self.where: list[tuple[int, int]] = []
        start = 0
        for size in sketch.nested:
            part = layers[start : start + size]
            if part:
                self.where += [(len(self.groups), place) for place in range(len(part))]
                self.groups.append(nn.ModuleList(part))
            start += size
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        for name in sketch.frozen_ends:
            self.get_submodule(name).requires_grad_(False)
        self.step = 0

    def begin(self, step: int, rank: int) -> None:
        """Which layers are used depends on the step; which expert of a layer, on the step and the rank."""
        self.step = step
        for layer in self.modules():
            if isinstance(layer, Layer):
                layer.chosen = (step * rank + rank) % 3

    def layer(self, index: int) -> nn.Module:
        group, place = self.where[index]
        return self.groups[group][place]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.entry(x)
        for number, call in enumerate(self.sketch.calls):
            if number in self.sketch.every_other and self.step % 2:
                continue
            layer = self.layer(call.layer)
            if call.how in ("read", "multiply"):
                first = next(layer.parameters(), None)
                factor = hidden.mean() if call.how == "multiply" else 1
                hidden = hidden if first is None else hidden + (first * factor).sum() * 0.01
            elif call.how == "recompute":
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            elif call.how == "run again" and hidden.requires_grad:
                hidden = checkpoint(layer, hidden, use_reentrant=True)
            else:
                hidden = layer(hidden)
        return self.head(self.middle(hidden)).square().mean()


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    num = draw(st.integers(1, 6))
    index = st.integers(0, num - 1)
    kinds = draw(st.tuples(*[st.sampled_from(["linear", "norm", "mlp", "scalar", "turned", "experts"])] * num))
    how = st.sampled_from(["call", "call", "call", "recompute", "run again", "read", "multiply"])
    calls = draw(st.lists(st.builds(Call, index, how), max_size=8))
    return Sketch(
        kinds=kinds,
        nested=(*draw(st.lists(st.integers(1, 3), max_size=3)), num),
        ties=tuple(draw(st.lists(st.tuples(index, index), max_size=2))),
        frozen=draw(st.frozensets(index, max_size=2)),
        calls=tuple(calls),
        every_other=draw(st.frozensets(st.integers(0, 7), max_size=2)),
        frozen_ends=draw(st.frozensets(st.sampled_from(["entry", "middle", "head"]), max_size=2)),
    )


def reread(*calls: Call, kind: str = "linear") -> Sketch:
    """A layer that is both called and read by a module, while reentrant checkpointing runs a nested backward."""
    return Sketch(
        kinds=(kind, "linear"), nested=(2,), ties=(), frozen=frozenset(), calls=calls, every_other=frozenset()
    )


PLANS: list[tuple[int, dict[str, Any]]] = [
    (2, {"preset": "zero3"}),
    (2, {"preset": "zero2"}),
    (2, {"preset": "zero1"}),
    (2, {"preset": "ddp"}),
    (2, {"preset": "zero3-kept"}),
    (3, {"preset": "zero3", "units": {"class": "Layer"}}),
    (4, {"preset": "hsdp", "mesh": {"node": 2, "local": 2}}),
    (4, {"preset": "hpz", "mesh": {"node": 2, "local": 2}, "prefetch_bytes": 10_000}),
    (2, {"preset": "zero3", "prefetch_bytes": 0}),
    (2, {"preset": "zero3", "units": {"min_numel": 40}}),
]
NUM_MODELS = drawn(4, 100)


@varies
@settings(
    max_examples=NUM_MODELS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@example(
    plan=PLANS[0], seed=3, shares_memory=False, sketch=reread(Call(0, "call"), Call(0, "run again"), Call(0, "read"))
)
@example(
    plan=PLANS[0],
    seed=0,
    shares_memory=False,
    sketch=Sketch(
        kinds=("linear", "linear"),
        nested=(2,),
        ties=(),
        frozen=frozenset({0}),
        calls=(Call(1, "call"), Call(0, "call"), Call(1, "call"), Call(1, "read"), Call(0, "call")),
        every_other=frozenset({0}),
    ),
)
@example(
    plan=PLANS[4],
    seed=85,
    shares_memory=False,
    sketch=reread(Call(0, "call"), Call(0, "run again"), Call(0, "read"), kind="mlp"),
)
@example(  # frozen layers that are recomputed between two of their calls
    plan=PLANS[0],
    seed=0,
    shares_memory=False,
    sketch=Sketch(
        kinds=("linear", "linear"),
        nested=(2,),
        ties=(),
        frozen=frozenset({0, 1}),
        calls=(Call(1, "read"), Call(0, "call"), Call(1, "recompute"), Call(0, "run again"), Call(0, "call")),
        every_other=frozenset(),
    ),
)
@given(sketch=sketches(), plan=st.sampled_from(PLANS), seed=st.integers(0, 99), shares_memory=st.booleans())
def test_drawn_models_train_like_their_twins(
    sketch: Sketch, plan: tuple[int, dict[str, Any]], seed: int, *, shares_memory: bool
) -> None:
    num_ranks, settings = plan
    if "experts" in sketch.kinds:  # one that only some ranks call must not be a unit by itself
        settings = {**settings, "units": {"class": "Layer"}}
    torch.manual_seed(seed)
    start = Drawn(sketch)
    data = torch.randn(NUM_STEPS, 12, WIDTH)
    twin = copy.deepcopy(start)
    optimizer = optimizer_of(twin)
    expected = []
    for step, x in enumerate(data):
        optimizer.zero_grad()
        losses = []
        for number, chunk in enumerate(x.chunk(num_ranks)):
            twin.begin(step, number)
            loss = twin(chunk) / num_ranks
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        expected.append(sum(losses))
    replicas = [copy.deepcopy(start) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Course:
        return drawn_course(world, replicas[world.rank], settings, data)

    courses = run_ranks(num_ranks, rank, shares_memory=shares_memory)
    assert mean_losses(courses) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for course in courses:
        assert course.working == 0
        for name, param in twin.named_parameters():
            assert torch.allclose(course.params[name], param, atol=1e-5), name


def drawn_course(world: sw.World, model: Drawn, plan: dict[str, Any], data: Tensor) -> Course:
    """Train a drawn model on one rank, and return its course."""

    def loss_of(step: int, x: Tensor) -> Tensor:
        model.begin(step, world.rank)
        return engine(x)

    with sw.shard(model, plan, optimizer=optimizer_of(model), world=world) as engine:
        return course_of(engine, data, loss_of)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay and momentum, which would reveal any update of an unused parameter."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
