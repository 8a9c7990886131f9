"""Ranks that call different modules, such as a vision tower where a batch has images: equal to the plain loop."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import ConfigError, FaultError
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
Ways = Sequence[Sequence[int]]
"""By step and rank, how many images the batch has."""
WIDTH, WORDS = 8, 11
AS_THEY_COME: Ways = ([1, 1], [1, 0], [0, 1], [0, 0], [1, 1], [0, 1])
ONE_RANK_FIRST: Ways = ([0, 1], [1, 0], [0, 0], [1, 1])
NONE_AT_FIRST: Ways = ([0, 0], [1, 0], [0, 0], [0, 1], [1, 1])
SEVERAL_CALLS: Ways = ([1, 0], [0, 2], [2, 1], [3, 0])
GATHERING = {"zero3", "zero3-kept", "zero3-offload", "hsdp", "hpz"}
TOWERS: dict[str, Any] = {
    "auto": "auto",
    "tower": ["emb", "vision", "blocks.*", "head"],
    "with others": ["emb+vision", "blocks.*", "head"],
    "small": {"min_numel": 1},
}


class Block(nn.Module):
    def __init__(self, *, sees: bool) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cross = nn.Linear(WIDTH, WIDTH) if sees else None

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        x = x + torch.tanh(self.mix(self.norm(x)))
        if seen is not None and self.cross is not None:
            x = x + self.cross(seen).mean(1, keepdim=True)
        return x


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.last = nn.Linear(5, WIDTH), nn.ModuleList([Block(sees=False)]), nn.Linear(8, 8)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Sees(nn.Module):
    """A language model with a tower for images, added to the embedding or read by some of its blocks."""

    def __init__(
        self,
        *,
        first: bool = False,
        cross: bool = False,
        late: bool = False,
        tied: bool = False,
        frozen: bool = False,
        again: str = "",
    ) -> None:
        super().__init__()
        self.again, self.cross, self.late = again, cross, late
        if first:
            self.vision = Tower()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(sees=cross and number == 1) for number in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if not first:
            self.vision = Tower()
        if tied:
            self.head.weight = self.emb.weight
        self.vision.first.requires_grad_(not frozen)

    def forward(self, x: Tensor, images: Sequence[Tensor]) -> Tensor:
        if self.late:
            loss = self.words(self.emb(x), x, None)
            return sum((self.vision(image).square().mean() for image in images), loss)
        h, seen = self.emb(x), None
        for image in images:
            features = checkpoint(self.vision, image, use_reentrant=False) if self.again else self.vision(image)
            seen = features if seen is None else seen + features
        if seen is not None and not self.cross:
            h = h + seen.mean(1, keepdim=True)
        return self.words(h, x, seen)

    def words(self, h: Tensor, x: Tensor, seen: Tensor | None) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block, h, seen, use_reentrant=False) if self.again == "all" else block(h, seen)
        return F.cross_entropy(self.head(h).flatten(0, 1).float(), x.roll(1, 1).flatten())


@dataclass(frozen=True)
class Job:
    """One training, which plain PyTorch and ranks do alike. A step has `accumulate` micro-batches."""

    plan: dict[str, Any]
    ways: Ways
    model: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    no_sync: bool = False
    between: Callable[[sw.Engine, Tensor], object] | None = None
    evaluates: bool = False
    shares_memory: bool = True

    @property
    def num_ranks(self) -> int:
        return len(self.ways[0])

    def data(self) -> list[list[tuple[Tensor, list[Tensor]]]]:
        """By micro-batch and rank."""
        generator = torch.Generator().manual_seed(1)
        return [
            [
                (
                    torch.randint(WORDS, (2, 5), generator=generator),
                    [torch.randn(2, 3, 5, generator=generator) for _ in range(count)],
                )
                for count in counts
            ]
            for counts in self.ways
        ]

    def plain(self, model: nn.Module) -> tuple[dict[str, Tensor], list[list[float]]]:
        optimizer, evaluated = _optimizer(model), []
        max_norm = self.plan.get("clip_grad_norm", float("inf"))
        for number, micro in enumerate(self.data(), start=1):
            (sum(model(*batch) for batch in micro) / len(micro) / self.accumulate).backward()
            if number % self.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                evaluated.append([model(*batch).item() for batch in micro])
        return model.state_dict(), evaluated

    def of_rank(self, model: nn.Module, world: sw.World) -> tuple[dict[str, Tensor], list[float]]:
        settings = {} if self.no_sync else {"accumulate": self.accumulate}
        engine, evaluated = sw.shard(model, {**self.plan, **settings}, optimizer=_optimizer(model), world=world), []
        for number, micro in enumerate(self.data(), start=1):
            waits = self.no_sync and number % self.accumulate
            with engine.no_sync() if waits else nullcontext():
                loss = model(*micro[world.rank])
                if self.between is not None:
                    self.between(engine, loss)
                engine.backward(loss / self.accumulate if self.no_sync else loss)
            if not waits:
                engine.step()
            if self.evaluates:
                with torch.no_grad():
                    evaluated.append(model(*micro[world.rank]).item())
        return engine.state_dict(), evaluated

    def run(self, *, tolerance: float = 2e-6) -> None:
        torch.manual_seed(0)
        model = Sees(**self.model)
        models = [copy.deepcopy(model) for _ in range(self.num_ranks)]
        wanted, losses = self.plain(model)
        run = run_ranks(
            self.num_ranks,
            lambda world: self.of_rank(models[world.rank], world),
            shares_memory=self.shares_memory,
        )
        for rank, (state, evaluated) in enumerate(run):
            for name, value in wanted.items():
                assert (state[name] - value).abs().max() < tolerance, (rank, name)
            for found, by_rank in zip(evaluated, losses, strict=False):
                assert found == pytest.approx(by_rank[rank], rel=1e-3 if tolerance > 1e-3 else 1e-5)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """It changes a parameter whose gradient is zero, but none that has no gradient."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.5)


def plan_for(preset: str, num_ranks: int = 2, **settings: Any) -> dict[str, Any]:
    mesh = {"mesh": {"node": num_ranks // 2, "local": 2}} if preset in ("hsdp", "hpz") else {}
    return {"preset": preset, **mesh, **settings}


@sampled
@pytest.mark.parametrize("units", TOWERS, ids=str)
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "offload", "zero3", "zero3-kept"])
def test_a_tower_where_there_are_images(preset: str, units: str) -> None:
    for ways in (AS_THEY_COME, ONE_RANK_FIRST):
        Job(plan_for(preset, units=TOWERS[units]), ways, shares_memory=ways is AS_THEY_COME).run()


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "zero3-offload"])
def test_images_that_come_later(preset: str) -> None:
    """Where parameters are whole that needs no setting; where they are gathered, a program must not expect them."""
    paths = {"paths": "by_rank"} if preset in GATHERING else {}
    for model in ({}, {"first": True}, {"cross": True}):
        Job(plan_for(preset, **paths), NONE_AT_FIRST, model, shares_memory=False).run()


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zero3-kept"])
def test_each_rank_calls_as_often_as_it_has_images(preset: str) -> None:
    Job(plan_for(preset), SEVERAL_CALLS, {"cross": True}, shares_memory=False).run()


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "hsdp", "hpz"])
def test_four_ranks(preset: str) -> None:
    ways = ([0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1])
    Job(plan_for(preset, 4), ways, {"cross": True}, shares_memory=False).run()


VARIATIONS: dict[str, Job] = {
    "tied": Job({}, AS_THEY_COME, {"tied": True}),
    "frozen": Job({}, AS_THEY_COME, {"frozen": True, "first": True}),
    "recomputed tower": Job({}, ONE_RANK_FIRST, {"again": "tower"}),
    "recomputed blocks": Job({}, ONE_RANK_FIRST, {"again": "all", "cross": True}),
    "recomputed by plan": Job({"activations": "recompute", "units": {"class": "Block"}}, AS_THEY_COME),
    "activations on the host": Job({"activations": "offload", "units": {"class": "Block"}}, AS_THEY_COME),
    "clipped": Job({"clip_grad_norm": 0.1}, AS_THEY_COME),
    "accumulated": Job({}, AS_THEY_COME, accumulate=2),
    "no_sync": Job({}, AS_THEY_COME, accumulate=2, no_sync=True),
    "evaluated": Job({}, ONE_RANK_FIRST, {"cross": True}, evaluates=True),
    "a collective before the backward": Job(
        {"paths": "by_rank"}, ONE_RANK_FIRST, between=lambda engine, loss: engine.mean(loss.item())
    ),
    "one after what a rank leaves out": Job(
        {"units": TOWERS["tower"], "prefetch_bytes": 0},
        ([1, 1], [1, 1], [0, 1], [0, 0], [1, 0]),
        {"late": True},
        between=lambda engine, loss: engine.mean(loss.item()),
    ),
}


@sampled
@pytest.mark.parametrize("name", VARIATIONS)
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_ranks_that_go_different_ways_with(name: str, preset: str) -> None:
    job = VARIATIONS[name]
    replace(job, plan=plan_for(preset, **job.plan), shares_memory=False).run()


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_in_bf16(preset: str) -> None:
    Job(plan_for(preset, precision="bf16"), AS_THEY_COME, evaluates=False).run(tolerance=5e-2)


@sampled
@pytest.mark.parametrize("seed", range(24))
def test_any_ways(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, accumulate = draw.choice([2, 2, 4]), draw.choice([1, 2])
    ways = [[draw.choice([0, 0, 1, 2]) for _ in range(num_ranks)] for _ in range(4 * accumulate)]
    model = {key: draw.random() < 0.4 for key in ("first", "cross", "tied", "frozen")}
    preset = draw.choice(["ddp", "zero1", "zero2", "offload", "zero3-offload", *sorted(GATHERING)])
    units = TOWERS["auto" if model["tied"] else draw.choice(sorted(TOWERS))]
    plan = plan_for(preset, num_ranks, units=units, prefetch_bytes=draw.choice(["auto", 0, 10**6]))
    plan |= {"paths": "by_rank"} if preset in GATHERING else {}
    model["again"] = draw.choice(["", "tower", "all"])
    no_sync, evaluates = draw.random() < 0.5, draw.random() < 0.5
    Job(plan, ways, model, accumulate, no_sync=no_sync, evaluates=evaluates, shares_memory=draw.random() < 0.5).run()


def test_what_no_rank_has_called_has_no_gradient() -> None:
    models = [Sees() for _ in range(2)]

    def of_rank(world: sw.World) -> list[bool]:
        model = models[world.rank]
        engine = sw.shard(model, "ddp", optimizer=_optimizer(model), world=world)
        found = []
        for micro in Job({}, AS_THEY_COME).data():
            engine.backward(model(*micro[world.rank]))
            found.append(engine.get("vision.last.weight", "grad") is not None)
            engine.step()
        return found

    assert run_ranks(2, of_rank) == [[any(counts) for counts in AS_THEY_COME]] * 2


def test_the_error_says_what_to_do() -> None:
    with pytest.raises(FaultError, match="say paths: by_rank in the plan"):
        Job(plan_for("zero3", units=TOWERS["tower"]), [[0, 0]] * 4 + [[0, 1]], shares_memory=False).run()


def test_an_evaluation_of_one_rank_is_told_from_a_round() -> None:
    """What that rank says of its way, at the end, is not taken for a unit that the others ask for in their next step.
    The error names calls by words, and none of our own functions."""
    models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)) for _ in range(3)]

    def of_rank(world: sw.World) -> str:
        model = models[world.rank]
        engine = sw.shard(
            model, {"preset": "zero3", "units": {"min_numel": 1}}, optimizer=_optimizer(model), world=world
        )

        def train() -> None:
            for _ in range(3):
                engine.backward(model(torch.ones(2, 8)).sum())
                engine.step()
                if world.rank == 0:
                    with torch.no_grad():
                        model(torch.ones(2, 8))

        with pytest.raises(FaultError) as caught:
            train()
        return str(caught.value)

    for told in run_ranks(3, of_rank):
        assert "rank 0" in told
        assert not re.search(r"\b_\w+\(\)", told), told


def test_a_pipeline_has_one_way() -> None:
    plan = {"preset": "zero1", "mesh": {"pp": 2, "dp": 1}, "paths": "by_rank"}

    def of_rank(world: sw.World) -> None:
        with pytest.raises(ConfigError, match="paths is by_rank"):
            sw.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), plan, world=world)

    run_ranks(2, of_rank)


@pytest.mark.parametrize("script", ["part by part, whole", "whole, part by part, whole"])
def test_a_model_that_was_called_part_by_part_is_called_whole(script: str) -> None:
    """The program of such a pass frees the root's own parameters between its parts, and they were read all the same."""
    first = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))
    data = torch.randn(2, 4)
    plan = plan_for("zero3", units=["1"])

    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for kind in script.split(", ") * 2:
            found.append((model(data) if kind == "whole" else _in_parts(model, data)).square().mean())
            found[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in found]

    def of_rank(world: sw.World) -> list[float]:
        model = copy.deepcopy(first)
        optimizer = _optimizer(model)
        with sw.shard(model, plan, optimizer=optimizer, world=world):
            return losses(model, optimizer)

    plain = copy.deepcopy(first)
    expected = losses(plain, _optimizer(plain))
    for found in run_ranks(2, of_rank, shares_memory=False):
        assert found == pytest.approx(expected, rel=1e-5)


def _in_parts(model: nn.Module, data: torch.Tensor) -> torch.Tensor:
    for part in model.children():
        data = part(data)
    return data
