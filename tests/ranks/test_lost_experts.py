"""A rank that has some of a layer's experts is lost: what test_lost_groups.py does not have of all axes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.parallel.experts import auxiliary_loss
from tests.models import Decoder, ExpertBlock, Mixture, Transformer
from tests.ranks.lost_groups import LOOPS, PRESETS, DiesBefore, Experts, race
from tests.ranks.test_lost_ranks import DiesAt
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
BIASED = {"scores": "sigmoid", "bias_rate": 0.05, "scale": 1.5}


class WithoutLossOfRouters(Mixture):
    """The loop adds the losses of its routers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return Transformer.forward(self, x, y)


class LoopAdds(Experts):
    def loss(self, model: nn.Module, step: int) -> Tensor:
        return super().loss(model, step) + auxiliary_loss(model)

    def loss_of_call(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return super().loss_of_call(module, x, y) + auxiliary_loss(module)


def lose_one_of_four(
    preset: str, fault: DiesBefore, folder: Path, task: Experts, mesh: dict[str, int], loop: str
) -> None:
    """Another one joins, so that four go on."""
    sizes = race("ep", preset, fault, folder, task=task, mesh=mesh, loop=loop, num_newcomers=1, least=4)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "ep": 2}, {"ep": 4}], ids=["dp", "ep", "ep alone"])
@pytest.mark.parametrize("loop", ["engine", "plain"])
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_the_loop_adds_the_losses_of_routers(preset: str, loop: str, mesh: dict[str, int], tmp_path: Path) -> None:
    """Those of an iteration that is void, too. And routers send nothing in it."""
    task = LoopAdds(partial(WithoutLossOfRouters, balance_loss=0.1, z_loss=0.01))
    lose_one_of_four(preset, DiesBefore(2, 2, "all_reduce of verdict"), tmp_path, task, mesh, loop)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "ep": 2}, {"ep": 4}], ids=["dp", "ep", "ep alone"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("step", [2, 3])
def test_choices_that_are_not_in_a_bias_yet_are_not_lost(
    step: int, loop: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    """Biases follow after two steps: the lost rank's choices count in them, and who joins between the two knows of
    those of the first."""
    task = Experts(partial(Mixture, **BIASED), every=2)
    lose_one_of_four("zero1", DiesBefore(1, step, "gather of weighed mean"), tmp_path, task, mesh, loop)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("nth", [7, 8, 9, 10, 14])
@pytest.mark.parametrize("axis", ["ep", "ep alone"])
def test_experts_are_recomputed(axis: str, nth: int, loop: str, preset: str, tmp_path: Path) -> None:
    """A router that is recomputed after a fault would choose other experts."""
    settings = {"activations": {"policy": "recompute"}}
    fault = DiesBefore(2, 2, "all_to_all of activations", nth)
    sizes = race(axis, preset, fault, tmp_path, settings=settings, loop=loop, num_newcomers=1, least=4)
    assert fault.is_dead
    assert {one[-1] for one in sizes.values()} == {4}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_routers_in_stages(preset: str, tmp_path: Path) -> None:
    """Each stage adds up what its own routers have counted; experts are whole on every rank."""
    task = Experts(lambda: Decoder(num_blocks=2, block=lambda _, width: ExpertBlock(width, **BIASED)))
    sizes = race("pp", preset, DiesAt({1: 90}), tmp_path, task=task, num_newcomers=1, least=4)
    assert sizes[0][-1] == 4
