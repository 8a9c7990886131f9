"""A rank is lost whose replica group differs along two of `pp`, `sp` and `ep`, or all three: the group leaves, and
comes back when it is complete. Losses, parameters and the biases of routers are those of the unsharded model."""

from __future__ import annotations

import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import mixtral
from torch import nn

import shardwise as sw
from tests.models import Decoder, ExpertBlock, Gpt
from tests.ranks.lost_groups import AXES, PRESETS, DiesBefore, Experts, Plant, Sequences, Task, race_of
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt, update
from tests.thorough import drawn, sampled, soak, thorough_only

Tensor = torch.Tensor
SCHEDULES = tuple(AXES["pp"].ways)
PAIRS = {"pp, sp": ("pp", "sp"), "pp, ep": ("pp", "ep"), "sp, ep": ("sp", "ep")}
BIASED = {"scores": "sigmoid", "bias_rate": 0.05, "scale": 1.5}


def with_experts(model: type[Decoder] | type[Gpt], num_blocks: int, **experts: Any) -> nn.Module:
    return model(num_blocks=num_blocks, block=lambda _, width: ExpertBlock(width, **experts))  # type: ignore[arg-type]


class Samples(Sequences):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make


class Mixtral(Experts):
    """The task: a model of transformers, which knows how its layers are split, and splits its batch by itself."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(partial(mixtral, num_blocks))

    def loss(self, model: nn.Module, step: int) -> Tensor:
        ids = self.batches[step][0]
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        return loss

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        ids = self.batches[step][0].tensor_split(num)[place]
        engine.weigh(len(ids), self._rows)
        if loop == "train_step":
            return engine.train_step({"input_ids": ids, "labels": ids})
        loss: Tensor = engine.module(input_ids=ids, labels=ids).loss
        update(loop, engine, optimizer, loss)
        return loss.detach()


def task_for(mesh: dict[str, int], num_blocks: int) -> Task:
    """One of which all axes of `mesh` can split the model."""
    if "tp" in mesh:
        return Mixtral(num_blocks)
    if "sp" not in mesh:
        return Experts(partial(with_experts, Decoder, num_blocks, **BIASED))
    if "ep" in mesh:
        return Samples(partial(with_experts, Gpt, num_blocks))
    return Samples(partial(Gpt, num_blocks=num_blocks))


def mesh_of(axes: tuple[str, ...]) -> dict[str, int]:
    return {"dp": 2, **dict.fromkeys(axes, 2)}


def race(
    preset: str, mesh: dict[str, int], plant: Plant, folder: Path, *, schedule: str = "1f1b", **more: Any
) -> dict[int, list[int]]:
    plan: dict[str, Any] = {"preset": preset, "mesh": mesh}
    if "pp" in mesh:
        plan |= {"accumulate": 2, "pipeline": {"schedule": schedule}}
    task = task_for(mesh, 4 if schedule == "interleaved" else 2)
    return race_of(task, plan, plant, folder, loop="train_step" if "pp" in mesh else "engine", **more)


POINTS = {
    "forward": {
        "pp, sp": ("all_to_all of activations", 2),
        "pp, ep": ("all_to_all of activations", 2),
        "sp, ep": ("all_to_all of activations", 3),
    },
    "backward": {
        "pp, sp": ("message of gradient 0", 1),
        "pp, ep": ("message of gradient 1", 1),
        "sp, ep": ("all_to_all of activations", 9),
    },
    "reduction": dict.fromkeys(PAIRS, ("*reduce* blocks.*", 1)),
    "verdict": dict.fromkeys(PAIRS, ("agree * verdict *", 1)),
    "commit": dict.fromkeys(PAIRS, ("exchange of commit", 1)),
}


@thorough_only("eight ranks")
def test_a_rehearsal_of_a_loss_over_tokens_sends_nothing(tmp_path: Path) -> None:
    """Before the first step stages are run on tensors without values. What `mean_over_tokens` sent of them lay in the
    buffers of later messages."""
    sizes = race("zero1", mesh_of(("pp", "sp")), lambda *_: None, tmp_path, shares_memory=False, most_wrong=0)
    assert len(sizes) == 8


@thorough_only("eight ranks; test_lost_groups.py has each axis with four")
@sampled
@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_before(point: str, pair: str, preset: str, rank: int, tmp_path: Path) -> None:
    """And a new one comes: it forms a group with the three that were spares, whatever part each of them had."""
    fault = DiesBefore(rank, 2, *POINTS[point][pair])
    sizes = race(preset, mesh_of(PAIRS[pair]), fault, tmp_path, num_newcomers=1, least=8)
    assert fault.is_dead
    assert len(sizes) == 8
    assert all(one[-1] == 8 for one in sizes.values())


@thorough_only("eight ranks; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pair", ["pp, sp", "pp, ep"])
def test_every_schedule(pair: str, schedule: str, tmp_path: Path) -> None:
    sizes = race("zero2", mesh_of(PAIRS[pair]), DiesAt({2: 150}), tmp_path, schedule=schedule)
    assert sizes.keys() == {4, 5, 6, 7}
    assert all(one[-1] == 4 for one in sizes.values())


@thorough_only("eight ranks; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("hosts", ["aaaabbbb", "abababab", "aabbccdd"])
def test_groups_on_several_hosts(hosts: str, pair: str, tmp_path: Path) -> None:
    """Where every group is on all hosts, no host may be lost."""
    fault = HostDiesAt({1: 120}, as_host=hosts != "abababab")
    sizes = race("zero1", mesh_of(PAIRS[pair]), fault, tmp_path, hosts=hosts)
    assert sizes.keys() == {4, 5, 6, 7}
    assert all(one[-1] == 4 for one in sizes.values())


def _a_rank_dies(draw: random.Random, folder: Path, axes: tuple[str, ...]) -> None:
    """At any collective, also of a recovery."""
    mesh = dict.fromkeys(draw.sample([*mesh_of(axes)], len(axes) + 1), 2)
    num_ranks = math.prod(mesh.values())
    is_replaced = draw.random() < 0.5
    folder.mkdir()
    race(
        draw.choice(PRESETS),
        mesh,
        DiesAt({draw.randrange(num_ranks): draw.randrange(3, 60 * num_ranks)}),
        folder,
        schedule=draw.choice(SCHEDULES),
        shares_memory=draw.random() < 0.5,
        num_newcomers=int(is_replaced),
        least=num_ranks if is_replaced else num_ranks // 2,
    )


@thorough_only("eight ranks; smaller tests beside it cover the same code")
@pytest.mark.parametrize("pair", PAIRS)
def test_a_rank_dies_anywhere(pair: str, tmp_path: Path) -> None:
    for seed in range(drawn(1, 8)):
        _a_rank_dies(random.Random(f"{pair} {seed}"), tmp_path / str(seed), PAIRS[pair])


@soak("draws moments at which ranks die, and takes minutes")
@pytest.mark.parametrize(
    "axes", [*PAIRS.values(), *(("tp", *axes) for axes in PAIRS.values()), ("pp", "sp", "ep")], ids=", ".join
)
def test_ranks_die_anywhere(axes: tuple[str, ...], tmp_path: Path) -> None:
    draw = random.Random()
    for attempt in range(20 if len(axes) == 2 else 4):
        _a_rank_dies(draw, tmp_path / str(attempt), axes)
