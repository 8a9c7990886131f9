"""Ranks are lost whose optimizer keeps its states as codes of 8 bits. The others cut these into other blocks, and so go
on exactly as ranks that have read a checkpoint of that step on the other mesh."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.optim.quantize import Coded
from shardwise.testing import run_ranks
from tests import inside
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt, assert_memory_as_promised
from tests.ranks.threads_as_members import run_members
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, HIDDEN, ROWS, NUM_STEPS = 64, 72, 12, 5
OTHER_ORDER = 1e-5
"""Where sums are taken in another order, and a few elements get the next code: on average. Wrong scales would make more
than a hundred times as much."""


class Wide(nn.Module):
    """Matrices of so many elements that their states are codes, and of so few that ranks cut blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return out


class Split(Wide):
    """Without a norm of all that `up` makes, of which each rank has a part."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, state_dtype="int8")


def train(engine: sw.Engine, num_steps: int, sizes: dict[int, int]) -> None:
    """`sizes`: of the worlds in which steps were taken, by step."""
    while engine.num_steps < num_steps:
        step, void, size = engine.num_steps, engine.num_void, engine.world.size
        place, num = engine.data_ranks
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(ROWS, WIDTH, generator=draw).tensor_split(num)[place] for _ in range(2))
        engine.weigh(len(x), ROWS)
        loss = ((engine.module(x) - y) ** 2).mean()
        engine.backward(loss)
        engine.step()
        if engine.num_steps > step and engine.num_void == void:
            sizes[step] = size  # also if a rank was lost where the step ended


def resumed_on_fewer(model: nn.Module, plans: Sequence[dict[str, Any]], sizes: Sequence[int], folder: Path) -> Any:
    """What ranks have that take the steps of the first of `sizes` ranks, and then those of as many as follow, each by
    the plan for its number, from checkpoints."""

    def part(world: World, first: int, last: int) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        plan = next(one for one in plans if one["ranks"] == world.size)["plan"]
        with sw.shard(own, plan, optimizer=adamw(own), world=world) as engine:
            if first:
                engine.resume(folder)
            train(engine, last, {})
            engine.save(folder)
            return engine.state_dict()

    cuts = [0, *(step for step in range(1, len(sizes)) if sizes[step] != sizes[step - 1]), len(sizes)]
    state: dict[str, Tensor] = {}
    for first, last in itertools.pairwise(cuts):
        state = run_ranks(sizes[first], lambda world, first=first, last=last: part(world, first, last))[0]
    return state


def race(
    plans: Sequence[dict[str, Any]], plant: Any, folder: Path, *, make: Any = Wide, bound: float = 0.0, **more: Any
) -> list[int]:
    """Returns the sizes of the worlds in which the steps were taken."""
    torch.manual_seed(5)
    model = make()
    images = folder / "images"
    images.mkdir()

    def work(world: World, member: int) -> tuple[dict[str, Tensor], list[int]]:
        own, sizes = copy.deepcopy(model), dict[int, int]()
        engine = sw.shard(own, plans[0]["plan"], optimizer=adamw(own), world=world)
        plant(engine, member)
        train(engine, NUM_STEPS, sizes)
        assert_memory_as_promised(engine)
        state = engine.state_dict()
        engine.close()
        return state, [sizes[step] for step in range(NUM_STEPS)]

    results = run_members(plans[0]["ranks"], work, images, **more)
    (_, sizes), *_ = results.values()
    expected = resumed_on_fewer(model, plans, sizes, folder / "checkpoints")
    for state, _ in results.values():
        for name, value in expected.items():
            assert (state[name] - value).abs().mean() <= bound, name
    return sizes


def of_sizes(plan: dict[str, Any], *sizes: int) -> list[dict[str, Any]]:
    return [{"ranks": size, "plan": plan} for size in sizes]


@sampled
@pytest.mark.parametrize("point", ["exchange of commit", "all_reduce of verdict"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2", "zero3", "zero3-offload"])
def test_the_others_cut_codes_anew(preset: str, rank: int, point: str, tmp_path: Path) -> None:
    fault = DiesBefore(rank, 2, point)
    sizes = race(of_sizes({"preset": preset}, 4, 3), fault, tmp_path)
    assert fault.is_dead
    assert (sizes[0], sizes[-1]) == (4, 3)


@sampled
@pytest.mark.parametrize("death", range(8, 21, 4))
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_two_ranks_die_one_after_the_other(preset: str, death: int, tmp_path: Path) -> None:
    deaths = DiesAt({0: death, 2: death + 9})
    sizes = race(of_sizes({"preset": preset}, 4, 3, 2), deaths, tmp_path, bound=OTHER_ORDER)
    assert sizes[-1] == 2


@sampled
@pytest.mark.parametrize("death", range(14, 30, 4))
@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero3"])
def test_a_host_is_lost_whose_codes_another_has(preset: str, death: int, tmp_path: Path) -> None:
    sizes = race(of_sizes({"preset": preset}, 4, 2), HostDiesAt({3: death}), tmp_path, hosts="aabb", bound=OTHER_ORDER)
    assert sizes[-1] == 2


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
def test_on_a_smaller_mesh(preset: str, tmp_path: Path) -> None:
    """Ranks had halves of the matrices, in blocks of their own."""
    tensor = {"tensor": {"plan": {"up": "column", "down": "row"}}}
    plans = [{"ranks": size, "plan": {"preset": preset, "mesh": {"tp": size}, **tensor}} for size in (2, 1)]
    fault = DiesBefore(1, 2, "exchange of commit")
    sizes = race(plans, fault, tmp_path, make=Split)
    assert fault.is_dead
    assert (sizes[0], sizes[-1]) == (2, 1)


def test_an_image_says_how_its_codes_are_read(tmp_path: Path) -> None:
    """Also of a piece that begins inside of a block, and of one so short that its scales have its shape."""
    torch.manual_seed(5)
    model = Wide()

    def work(world: World, _: int) -> list[tuple[str, Coded, tuple[int, ...]]]:
        own = copy.deepcopy(model)
        engine = sw.shard(own, "zero1", optimizer=adamw(own), world=world)
        train(engine, 2, {})
        image = inside.survival(engine).image
        inside.survival(engine).await_copies()
        coded = [(cell, cell.codes) for cell in image.directory.cells if isinstance(cell.codes, Coded)]
        for piece in inside.adopted(engine).pieces:
            dense = inside.adopted(engine).state_of(piece)
            for cell, codes in coded:
                if cell.name == piece.name:
                    scales = image.directory.scales()[cell.name, codes.scales]
                    values = codes.read(image.shadow(cell), image.shadow(scales))
                    assert torch.equal(values, dense[cell.kind].reshape(-1))
        engine.close()
        return [(cell.name, codes, cell.shape) for cell, codes in coded]

    results = run_members(3, work, tmp_path)
    every = [one for found in results.values() for one in found]
    assert {name for name, _, _ in every} == {"up.weight", "down.weight"}
    assert any(coded.start % 256 for _, coded, _ in every)
