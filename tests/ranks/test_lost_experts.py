"""A rank that has some of a layer's experts is lost: its replica group leaves, and comes back when it is complete.
Losses, parameters and the biases of routers are those of the unsharded model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import split_models
import torch
from small_transformers import mixtral
from test_experts import TENSOR, CutTransformer
from torch import nn
from twins import batches

import shardwise as sw
from shardwise.parallel.experts import auxiliary_loss, update_biases
from tests.models import Decoder, ExpertBlock, Mixture, Transformer
from tests.ranks.lost_groups import NUM_STEPS, DiesBefore, race_of
from tests.ranks.test_buddies import HostDiesAt
from tests.ranks.test_lost_ranks import DiesAt, update
from tests.thorough import drawn, sampled, soak, thorough_only, varies

Tensor = torch.Tensor
PRESETS = ("ddp", "zero1", "zero2", "zero3")
LOOPS = ("engine", "plain", "train_step")
EXPERTS: dict[str, dict[str, Any]] = {
    "plain": {"gated": False, "activation": "gelu"},
    "uneven": {"num_experts": 5, "top_k": 3},
    "balanced, shared": {"balance_loss": 0.1, "z_loss": 0.01, "shared_size": 16},
    "biased": {"scores": "sigmoid", "bias_rate": 0.05, "scale": 1.5},
    "with a capacity": {"capacity_factor": 4.0},
}
"""Settings of `MoE`. With this capacity nothing is dropped: what is depends on the number of ranks."""


class Tokens:
    """The task: a language model with experts in all blocks but the first."""

    def __init__(self, make: Callable[[], nn.Module], *, every: int = 1, rows: int = 8) -> None:
        """Biases are updated after `every` few steps."""
        self.make = make
        self._every, self._rows = every, rows
        self._num_plain = 0
        self.batches = batches(NUM_STEPS, rows)

    def loss(self, model: nn.Module, step: int) -> Tensor:
        loss: Tensor = model(*self.batches[step])
        return loss

    def after_step(self, plain: nn.Module) -> None:
        self._num_plain += 1
        if self._num_plain % self._every == 0:
            update_biases(plain)

    def take_step(
        self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
    ) -> Tensor:
        x, y = (part.tensor_split(num)[place] for part in self.batches[step])
        engine.weigh(len(x), self._rows)
        if loop == "train_step":
            loss = engine.train_step((x, y))
        else:
            loss = engine.module(x, y)
            if isinstance(engine.module, WithoutLossOfRouters):
                loss = loss + auxiliary_loss(engine.module)
            update(loop, engine, optimizer, loss)
        if engine.num_steps % self._every == 0:  # in void iterations, too
            update_biases(engine.module)
        return loss.detach()


def race(
    experts: str, plan: dict[str, Any], plant: Callable[[sw.Engine, int], None], folder: Path, **more: Any
) -> dict[int, list[int]]:
    return race_in(Tokens(partial(Mixture, **EXPERTS[experts])), plan, plant, folder, **more)


def race_in(
    task: Tokens, plan: dict[str, Any], plant: Callable[[sw.Engine, int], None], folder: Path, **more: Any
) -> dict[int, list[int]]:
    return race_of(task, plan, plant, folder, after_step=task.after_step, **more)


def plan_of(preset: str, **mesh: int) -> dict[str, Any]:
    return {"preset": preset, "mesh": mesh or {"dp": 2, "ep": 2}}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("experts", EXPERTS)
def test_a_group_leaves_and_comes_back(experts: str, loop: str, preset: str, tmp_path: Path) -> None:
    sizes = race(experts, plan_of(preset), DiesAt({2: 60}), tmp_path, loop=loop, num_newcomers=1, least=4)
    assert sizes.keys() == {0, 1, 3, 4}
    assert {one[-1] for one in sizes.values()} == {4}


POINTS = {
    "how many rows are sent": ("all_to_all of activations", 1),
    "rows are sent": ("all_to_all of activations", 2),
    "rows come back": ("all_to_all of activations", 6),
    "gradients of rows": ("all_to_all of activations", 8),
    "balance of the first router, or choices in the step": ("all_reduce of activations", 1),
    "reduction of experts": ("*reduce* blocks.1:ep *", 1),
    "reduction": ("*reduce* blocks.2 *", 1),
    "waiting": ("wait blocks.1*", 1),
    "verdict": ("all_reduce of verdict", 1),
    "commit": ("exchange of commit", 1),
    "mean": ("gather of weighed mean", 1),
}


@sampled
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("experts", ["balanced, shared", "biased"])
@pytest.mark.parametrize("point", POINTS)
def test_a_rank_dies_before(point: str, experts: str, preset: str, rank: int, tmp_path: Path) -> None:
    fault = DiesBefore(rank, 2, *POINTS[point])
    is_replaced = rank == 3
    more = {"num_newcomers": int(is_replaced), "least": 4 if is_replaced else 2}
    sizes = race(experts, plan_of(preset), fault, tmp_path, **more)
    assert fault.is_dead
    assert all(one[-1] == (4 if is_replaced else 2) for one in sizes.values())


def _a_rank_dies(draw: random.Random, folder: Path, meshes: list[dict[str, int]]) -> None:
    """At any collective, also of a recovery."""
    mesh = draw.choice(meshes)
    num_ranks = math.prod(mesh.values())
    is_replaced = draw.random() < 0.5
    folder.mkdir()
    race_in(
        Tokens(partial(Mixture, **EXPERTS[draw.choice(list(EXPERTS))]), rows=12),
        plan_of(draw.choice(PRESETS), **mesh),
        DiesAt({draw.randrange(num_ranks): draw.randrange(3, 200)}),
        folder,
        num_ranks=num_ranks,
        loop=draw.choice(LOOPS),
        shares_memory=draw.random() < 0.5,
        num_newcomers=int(is_replaced),
        least=num_ranks if is_replaced else num_ranks // 2,
    )


@varies
def test_a_rank_dies_anywhere(tmp_path: Path) -> None:
    for seed in range(drawn(1, 20)):
        _a_rank_dies(random.Random(seed), tmp_path / str(seed), [{"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}])


@soak("draws moments at which ranks die, and takes minutes")
@pytest.mark.parametrize("number", range(8))
def test_ranks_die_anywhere(number: int, tmp_path: Path) -> None:
    draw = random.Random()
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        _a_rank_dies(draw, folder, [{"dp": 2, "ep": 2}, {"ep": 2, "dp": 2}, {"dp": 2, "ep": 3}, {"dp": 3, "ep": 2}])


class WithoutLossOfRouters(Mixture):
    """The loop adds the losses of its routers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return Transformer.forward(self, x, y)


class LoopAdds(Tokens):
    def loss(self, model: nn.Module, step: int) -> Tensor:
        return super().loss(model, step) + auxiliary_loss(model)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "ep": 2}], ids=["dp", "ep"])
@pytest.mark.parametrize("loop", ["engine", "plain"])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_the_loop_adds_the_losses_of_routers(preset: str, loop: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Those of an iteration that is void, too. And routers send nothing in it."""
    task = LoopAdds(partial(WithoutLossOfRouters, balance_loss=0.1, z_loss=0.01))
    fault = DiesBefore(2, 2, "all_reduce of verdict")
    sizes = race_in(task, plan_of(preset, **mesh), fault, tmp_path, loop=loop, num_newcomers=1, least=4)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "ep": 2}], ids=["dp", "ep"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("step", [2, 3])
def test_choices_that_are_not_in_a_bias_yet_are_not_lost(
    step: int, loop: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    """Biases follow after two steps: the lost rank's choices count in them, and who joins between the two knows of
    those of the first."""
    task = Tokens(partial(Mixture, **EXPERTS["biased"]), every=2)
    fault = DiesBefore(1, step, "gather of weighed mean")
    sizes = race_in(task, plan_of("zero1", **mesh), fault, tmp_path, loop=loop, num_newcomers=1, least=4)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", ["engine", "train_step"])
@pytest.mark.parametrize("nth", [7, 8, 9, 10, 14])
def test_experts_are_recomputed(nth: int, loop: str, preset: str, tmp_path: Path) -> None:
    """A router that is recomputed after a fault chooses other experts."""
    plan = {**plan_of(preset), "activations": {"policy": "recompute"}}
    fault = DiesBefore(2, 2, "all_to_all of activations", nth)
    sizes = race("balanced, shared", plan, fault, tmp_path, loop=loop, num_newcomers=1, least=4)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcd"])
def test_groups_on_several_hosts(hosts: str, preset: str, tmp_path: Path) -> None:
    fault = HostDiesAt({1: 67}, as_host=hosts != "abab")
    sizes = race("biased", plan_of(preset), fault, tmp_path, hosts=hosts, loop="train_step")
    assert sizes.keys() == {2, 3}
    assert sizes[2][-1] == 2


@thorough_only("eight ranks; the gate has the same of split layers")
@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
def test_a_mesh_with_two_data_axes(preset: str, tmp_path: Path) -> None:
    sizes = race("uneven", plan_of(preset, node=2, local=2, ep=2), DiesAt({3: 60}), tmp_path, num_ranks=8)
    assert sizes.keys() == {0, 1, 4, 5, 6, 7}
    assert sizes[0][-1] == 6


@thorough_only("slow; smaller tests beside it cover the same code")
def test_spares_of_two_groups_are_a_group(tmp_path: Path) -> None:
    """Without anybody new: both had the same experts, and one takes others."""
    sizes = race("uneven", plan_of("zero2", dp=3, ep=2), DiesAt({1: 60, 3: 150}), tmp_path, num_ranks=6)
    assert sizes.keys() == {0, 2, 4, 5}
    assert {one[-1] for one in sizes.values()} == {4}


class Frozen(Mixture):
    """Some experts are not trained, nor is something that all ranks have."""

    def __init__(self) -> None:
        super().__init__(num_experts=5)
        for param in (self.blocks[1].moe.experts.down_proj, self.blocks[2].moe.router.weight):
            param.requires_grad_(False)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_frozen_is_there_afterwards(preset: str, tmp_path: Path) -> None:
    sizes = race_in(Tokens(Frozen), plan_of(preset), DiesAt({0: 60}), tmp_path, num_newcomers=1, least=4)
    assert sizes.keys() == {1, 2, 3, 4}


SETTINGS: dict[str, dict[str, Any]] = {
    "clipping": {"clip_grad_norm": 1e9},
    "micro-batches": {"preset": "zero3", "accumulate": 2},
    "on the host": {"preset": "zero3-offload"},
    "bf16": {"precision": "bf16"},
}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_with_other_settings_of_a_plan(setting: str, rank: int, tmp_path: Path) -> None:
    sizes = race(
        "plain",
        {**plan_of("zero1"), **SETTINGS[setting]},
        DiesAt({rank: 75}),
        tmp_path,
        loop="train_step" if setting == "micro-batches" else "engine",
        num_newcomers=1,
        least=4,
        bound=5e-2 if setting == "bf16" else 5e-6,
    )
    assert sizes[3 - rank][-1] == 4


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_with_split_attention(preset: str, tmp_path: Path) -> None:
    task = Tokens(CutTransformer)
    task.batches = [(split_models.tokens(step, 8),) * 2 for step in range(NUM_STEPS)]
    plan = {**plan_of(preset, dp=2, ep=2, tp=2), "tensor": TENSOR}
    sizes = race_in(task, plan, DiesAt({3: 90}), tmp_path, num_ranks=8, num_newcomers=1, least=8)
    assert sizes[0][-1] == 8


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_routers_in_stages(preset: str, tmp_path: Path) -> None:
    """Each stage adds up what its own routers have counted; experts are whole on every rank."""
    task = Tokens(lambda: Decoder(num_blocks=2, block=lambda _, width: ExpertBlock(width, **EXPERTS["biased"])))
    plan = {**plan_of(preset, dp=2, pp=2), "accumulate": 2}
    sizes = race_in(task, plan, DiesAt({1: 90}), tmp_path, loop="train_step", num_newcomers=1, least=4)
    assert sizes[0][-1] == 4


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_model_of_transformers(tmp_path: Path) -> None:
    class Own(Tokens):
        def loss(self, model: nn.Module, step: int) -> Tensor:
            ids = self.batches[step][0]
            loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        def take_step(
            self, loop: str, engine: sw.Engine, optimizer: torch.optim.Optimizer, step: int, place: int, num: int
        ) -> Tensor:
            ids = self.batches[step][0].tensor_split(num)[place]
            engine.weigh(len(ids), self._rows)
            loss: Tensor = engine.module(input_ids=ids, labels=ids).loss
            update(loop, engine, optimizer, loss)
            return loss.detach()

    fault = DiesBefore(1, 2, *POINTS["rows are sent"])
    sizes = race_in(Own(mixtral), plan_of("zero2"), fault, tmp_path, num_newcomers=1, least=4)
    assert sizes[0][-1] == 4
