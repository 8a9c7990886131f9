"""An island leaves an elastic job when it loses a rank, and comes back: against a plain DiLoCo in one process whose
islands leave and join before the same steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_islands import PlainIslands, Values
from test_islands import WIDTH, batches, loss_of
from torch import nn

import shardwise as sw
from shardwise.comm import World
from shardwise.parallel.experts import MoE
from shardwise.plan import Islands
from tests.covering import covering
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.threads_as_members import ThreadMembership, run_members
from tests.ranks.twins import rounded_by
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
ROWS, NUM_STEPS = 12, 9
UNITS = ["0", "2", "4"]
ROUNDING = 1e-13
"""Of fp64: each comparison is of sums that are taken in another order, over nine steps."""
FLIPPED, SHARE_OF_FLIPS = 1e-4, 0.05
"""Of fp32 and int4."""
STREAMS: dict[str, dict[str, Any]] = {
    "whole": {"every": 3},
    "overlapping": {"every": 4, "fragments": 2, "overlap": 1, "mix": 0.25},
}
POINTS = {
    "whole": {
        "the backward": (1, "*reduce* 2 *", 1),
        "the verdict": (2, "all_reduce of verdict", 1),
        "subtract": (3, "subtract 2 outer", 1),
        "send": (3, "all_reduce 0 outer *", 1),
        "wait": (3, "wait 2 outer", 1),
        "update": (3, "update 4 anchor", 1),
        "go on": (3, "mix 2 master", 1),
        "commit": (3, "exchange of commit", 1),
        "after it": (3, "*reduce* 2 *", 1),
        "the end": (9, "mix 0 master", 1),
    },
    "overlapping": {
        "send": (2, "all_reduce 4 outer *", 1),
        "commit, with gradients on their way": (2, "exchange of commit", 1),
        "a step, with gradients on their way": (2, "*reduce* 2 *", 1),
        "wait": (3, "wait 0 outer", 1),
        "go on": (3, "mix 4 master", 1),
        "commit": (3, "exchange of commit", 1),
        "the next fragment": (4, "subtract 2 outer", 1),
    },
}
MESHES = {"pairs": {"island": 2, "dp": 2}, "single ranks": {"island": 3}, "innermost": {"dp": 2, "island": 2}}


def start() -> nn.Sequential:
    """With statistics of batches, which are an island's own."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    inner = nn.Linear(WIDTH, WIDTH, bias=False)  # after which the norm would leave a bias gradients of rounding errors
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), inner, norm, nn.Linear(WIDTH, 4)]
    return nn.Sequential(*layers).double()


def plain_start() -> nn.Sequential:
    """Without them, for islands of several ranks: each has some of the rows."""
    model = start()
    model[3] = nn.Tanh()
    return model


def mixed_start() -> nn.Sequential:
    """With experts, whose routers count nothing."""
    model = plain_start()
    model[2] = MoE(WIDTH, WIDTH, 4).double()
    return model


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Whose updates are not nearly whole multiples of one number, as AdamW's first ones, and so between two codes."""
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


Islanders = tuple[tuple[int, ...], ...]
"""The members of each island."""


def race(
    preset: str,
    mesh: dict[str, int],
    stream: str,
    fault: DiesBefore,
    folder: Path,
    *,
    loop: str = "engine",
    num_newcomers: int = 0,
    save_after: int | None = None,
    make: Callable[[], nn.Module] | None = None,
    wire: dict[str, Any] | None = None,
    **more: Any,
) -> list[Islanders]:
    """Train on threads, of which one dies, beside plain islands. Returns who was on the islands in each step. With a
    `wire` of outer gradients all is in fp32: there are no codes of fp64."""
    model = (make or (start if mesh == MESHES["single ranks"] else plain_start))()
    data, settings = batches(NUM_STEPS, rows=ROWS), STREAMS[stream]
    if wire is not None:
        model, data, settings = model.float(), [(x.float(), y.float()) for x, y in data], {**settings, "wire": wire}
    precision, inner = ("fp64", adamw) if wire is None else ("fp32", sgd)
    num_ranks = torch.Size(mesh.values()).numel()
    plan = {"preset": preset, "mesh": mesh, "units": UNITS, "precision": precision, "islands": settings, **more}
    names = [name for name, _ in model.named_parameters()]
    models = [copy.deepcopy(model) for _ in range(num_ranks + num_newcomers)]

    def work(world: World, member: int) -> tuple[dict[int, Islanders], Values, Values, Values]:
        own = models[member]
        engine = sw.shard(own, plan, optimizer=inner(own.parameters()), world=world)
        fault(engine, member)
        membership = engine.world.membership
        assert isinstance(membership, ThreadMembership)
        found: dict[int, Islanders] = {}
        while engine.num_steps < NUM_STEPS:
            step, void, members = engine.num_steps, engine.num_void, membership.members
            place, num = engine.data_ranks
            x, y = (one.chunk(num)[place] for one in data[step])
            engine.weigh(len(x), ROWS)
            if loop == "train_step":
                engine.train_step(x, y, loss_fn=nn.functional.mse_loss)
            else:
                engine.backward(loss_of(engine, x, y))
                engine.step()
            if engine.num_steps == step + 1 and engine.num_void == void:
                found[step] = islands_of(members, mesh)
                if engine.num_steps == save_after:
                    engine.save(folder / "saved")
        common = {name: engine.get(name, "outer.anchor") for name in names}
        momentum = {name: engine.get(name, "outer.momentum") for name in names}
        values = {name: engine.get(name) for name in names}
        values |= {name: buffer.clone() for name, buffer in own.named_buffers()}
        engine.close()
        return found, common, momentum, values  # type: ignore[return-value]  # a rank with all has no `None`

    images = folder / "images"
    images.mkdir()
    results = run_members(num_ranks, work, images, num_newcomers=num_newcomers)
    assert fault.is_dead
    assert not [path for path in images.rglob("*") if path.is_file()], "an island leaves nothing that others would read"
    steps: dict[int, Islanders] = {}
    for found, *_ in results.values():
        for step, islands in found.items():
            assert steps.setdefault(step, islands) == islands
    assert sorted(steps) == list(range(NUM_STEPS)), "each step was taken once"
    of_stream = Islands(**STREAMS[stream])
    plain = PlainIslands(model, UNITS, of_stream, inner, loss_of, steps[0], rounded_by(wire))
    for step, (x, y) in enumerate(data):
        plain.go_on_with(steps[step])
        num = len(steps[step])
        order = rows_by_island(num, len(steps[step][0]), is_innermost=next(iter(mesh)) == "dp")
        plain.step((x[rows], y[rows]) for rows in order)
    for member, (_, common, momentum, values) in results.items():
        own = next(one for island, one in plain.models.items() if member in island)
        close = assert_close if wire is None else assert_close_but_for_flips
        for name, param in plain.common.items():
            close(common[name], param)
            close(momentum[name], plain.outer.state[param]["momentum_buffer"])
        for name, value in own.state_dict().items():
            close(values[name], value)
    return [steps[step] for step in range(NUM_STEPS)]


def islands_of(members: tuple[int, ...], mesh: dict[str, int]) -> Islanders:
    of_each = torch.Size(mesh.values()).numel() // mesh["island"]
    num = len(members) // of_each
    if next(iter(mesh)) == "island":
        return tuple(members[first : first + of_each] for first in range(0, len(members), of_each))
    return tuple(members[island::num] for island in range(num))


def rows_by_island(num: int, of_each: int, *, is_innermost: bool) -> list[Tensor]:
    """The rows of a batch that each island reads."""
    shares = torch.arange(ROWS).chunk(num * of_each)
    if is_innermost:
        return [torch.cat(shares[island::num]) for island in range(num)]
    return [torch.cat(shares[first : first + of_each]) for first in range(0, num * of_each, of_each)]


def assert_close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right.detach(), rtol=0, atol=ROUNDING)


def assert_close_but_for_flips(found: Tensor, right: Tensor) -> None:
    """Where nothing is rounded alike, nearly all elements are away: the next code is 1e-3 from an element's."""
    assert ((found - right.detach()).abs() > FLIPPED).float().mean() <= SHARE_OF_FLIPS


def points() -> list[tuple[str, str, str, str, int]]:
    values = {
        "point": [(stream, point) for stream, of_stream in POINTS.items() for point in of_stream],
        "preset": ["zero1", "zero3", "ddp", "zero3-offload"],
        "mesh": list(MESHES),
        "rank": [0, 1, 2],
    }
    found = []
    for case in covering(values, strength=2):
        stream, point = case["point"]
        is_inside = "outer" not in POINTS[stream][point][1] and "commit" not in point  # ranks of one island send
        mesh = "pairs" if is_inside and case["mesh"] == "single ranks" else case["mesh"]
        found.append((stream, point, case["preset"], mesh, case["rank"]))
    return found


@sampled
@pytest.mark.parametrize(("stream", "point", "preset", "mesh", "rank"), points())
def test_an_island_is_lost_before(stream: str, point: str, preset: str, mesh: str, rank: int, tmp_path: Path) -> None:
    """The others repeat the step, and average over those that are left; a last one has outer steps of its own."""
    fault = DiesBefore(rank, *POINTS[stream][point])
    steps = race(preset, MESHES[mesh], stream, fault, tmp_path)
    assert len(steps[0]) == MESHES[mesh]["island"]
    assert point == "the end" or len(steps[-1]) == MESHES[mesh]["island"] - 1


@sampled
@pytest.mark.parametrize("num_newcomers", [0, 1])
@pytest.mark.parametrize(("stream", "point"), [(stream, point) for stream, of in POINTS.items() for point in of])
@pytest.mark.parametrize("preset", ["zero1", "zero3", "ddp", "zero3-offload"])
def test_outer_gradients_are_codes_when_an_island_is_lost_or_joins(
    preset: str, stream: str, point: str, num_newcomers: int, tmp_path: Path
) -> None:
    """Before each point of an outer step, and while codes are on their way."""
    fault = DiesBefore(1, *POINTS[stream][point])
    codes = {"dtype": "int4", "block": 16}
    race(preset, MESHES["pairs"], stream, fault, tmp_path, num_newcomers=num_newcomers, wire=codes)


@sampled
@pytest.mark.parametrize("loop", ["engine", "train_step"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("preset", ["zero1", "zero3", "zero3-offload"])
@pytest.mark.parametrize("mesh", MESHES)
def test_an_island_joins(mesh: str, preset: str, stream: str, loop: str, tmp_path: Path) -> None:
    """It begins as the first island is then. Ranks of the lost island that live are on it."""
    steps = race(
        preset, MESHES[mesh], stream, DiesBefore(1, 2, "exchange of commit"), tmp_path, loop=loop, num_newcomers=1
    )
    assert len(steps[-1]) == MESHES[mesh]["island"]
    newcomer = torch.Size(MESHES[mesh].values()).numel()
    assert steps[0] != steps[-1]
    assert any(newcomer in island for island in steps[-1])


@thorough_only("what is inside of islands is tested without losses, too")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ({"island": 2, "pp": 2}, {"pipeline": {"stages": [["0", "2"], ["4"]]}, "accumulate": 2}),
        ({"island": 2, "ep": 2}, {"make": mixed_start}),
        ({"island": 2, "tp": 2}, {"tensor": {"plan": {"0": "column", "2": "row"}}}),
    ],
    ids=["stages", "experts", "split layers"],
)
def test_whatever_an_island_has_inside_leaves_and_comes_back(
    mesh: dict[str, int], more: dict[str, Any], preset: str, tmp_path: Path
) -> None:
    fault = DiesBefore(1, 3, "all_reduce * outer *")
    steps = race(preset, mesh, "whole", fault, tmp_path, loop="train_step", num_newcomers=1, **more)
    assert any(4 in island for island in steps[-1])


@thorough_only("what is saved is tested without losses, too")
def test_what_has_come_for_a_checkpoint_stays(tmp_path: Path) -> None:
    """A checkpoint waits for outer gradients that are on their way, and so changes what islands have in common."""
    fault = DiesBefore(0, 6, "subtract 0 outer")
    race("zero3", MESHES["pairs"], "overlapping", fault, tmp_path, save_after=2)
