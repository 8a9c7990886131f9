"""How many Python functions of this library a step calls: in all, and for each parameter, of which models have
hundreds."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from twins import adamw

import shardwise as sw
from benchmarks.calls import MESSAGES, OWN, calls_during
from benchmarks.overhead_rank import BATCH, DIM, Block, ours
from shardwise.memory import Flat, FlatGradients
from shardwise.testing import run_ranks
from tests import inside
from tests.ranks.threads_as_members import run_members

NUM_RANKS, FEW, MANY = 2, 4, 24
MOST_FOR_A_PARAMETER = 2
"""One when its gradient arrives, and one that stores it. It was 5 while the optimizer was given gradients, and writes
were counted, by parameter."""
MOST_FOR_ELASTIC, MOST_FOR_ELASTIC_AND_A_PARAMETER = 162, 1
"""What a step calls more where a rank may be lost, beside what sends messages and looks for them."""
MOST_OF_SMALL_BLOCKS = {"ddp": 1950, "zero3": 2630}
"""In a step of 8 units with 16 parameters each, on one of 8 ranks of which nothing has to be awaited. It was 1,988 and
2,718 before what all steps have in common was worked out once."""


class Vectors(nn.Module):
    """One unit with so many parameters, between which nothing is padded."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(64) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * vector).sum() for vector in self.vectors]).square().mean()


def calls_of_a_step(num_params: int, plan: str = "ddp", images: Path | None = None) -> int:
    """On the rank that makes the most; with a folder for `images`, in an elastic job. What messages take is left
    out: it depends on how late they are, so that an elastic step made 202 to 225 calls more instead of 162."""
    models = [Vectors(num_params) for _ in range(NUM_RANKS)]

    def rank(world: sw.World, _: int = 0) -> int:
        model = models[world.rank]
        optimizer = torch.optim.AdamW(model.parameters())
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:

            def step() -> None:
                engine.backward(engine(torch.ones(64)))
                engine.step()

            for _ in range(3):
                step()
            return calls_during(step, within=OWN, but=MESSAGES)

    return max(run_ranks(NUM_RANKS, rank) if images is None else run_members(NUM_RANKS, rank, images).values())


def test_a_parameter_costs_two_calls() -> None:
    for_a_parameter = (calls_of_a_step(MANY) - calls_of_a_step(FEW)) / (MANY - FEW)
    assert for_a_parameter <= MOST_FOR_A_PARAMETER


@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero3"])
def test_a_step_that_may_be_repeated_costs_little_more(plan: str, tmp_path: Path) -> None:
    few, many = (calls_of_a_step(num, plan, tmp_path) - calls_of_a_step(num, plan) for num in (FEW, MANY))
    assert few <= MOST_FOR_ELASTIC
    assert (many - few) / (MANY - FEW) <= MOST_FOR_ELASTIC_AND_A_PARAMETER


@pytest.mark.parametrize("preset", MOST_OF_SMALL_BLOCKS)
def test_a_step_of_small_blocks_costs_no_more_than_it_did(preset: str) -> None:
    """What `python -m benchmarks commits` counts, without what torch calls."""
    torch.manual_seed(0)
    parts = ours(preset, nn.Sequential(*(Block() for _ in range(8))), "fp32", torch.randn(BATCH, DIM))

    def step() -> None:
        parts.passes()
        parts.update()

    for _ in range(4):
        step()
    assert calls_during(step, within=OWN) <= MOST_OF_SMALL_BLOCKS[preset]


class Resting(nn.Linear):
    """Lets its parameters rest in its last backward, before their gradients come."""

    num_left = 4
    flats: Sequence[Flat] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.rest())
        return y.clone()

    def rest(self) -> None:
        self.num_left -= 1
        for flat in () if self.num_left else self.flats:
            flat.guard.rest()


@pytest.mark.parametrize(
    ("schedule", "what", "num_taken"),
    [
        ("1f1b", "", (1, 1)),
        ("1f1b", "weighs", (4, 4)),
        ("1f1b", "rests", (1, 1)),
        ("interleaved", "", (1, 1)),
        ("zb-h1", "", (1, 4)),
    ],
)
def test_autograd_adds_gradients_of_later_micro_batches(
    schedule: str, what: str, num_taken: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they stay in its tensors, none waits for the second half of a backward (under zb-h1 those of the last rank
    do), and all count alike. Parameters have no `grad` of autograd's afterwards."""
    num_stages, taken, plain = 4 if schedule == "interleaved" else 2, Counter[str](), FlatGradients.arrive

    def arrive(self: FlatGradients, index: int, grad: torch.Tensor, is_last: bool = True) -> bool:
        taken[threading.current_thread().name] += 1
        if what == "weighs":
            self.weigh(1.0)  # what comes next may count otherwise
        return plain(self, index, grad, is_last)

    monkeypatch.setattr(FlatGradients, "arrive", arrive)
    torch.manual_seed(0)
    kind = Resting if what == "rests" else nn.Linear
    layers, x = nn.Sequential(*(kind(8, 8) for _ in range(num_stages))), torch.randn(4, 8)
    models = [copy.deepcopy(layers) for _ in range(2)]
    for part in x.split(1):
        (layers(part).square().mean() / 4).backward()
    plan = {"preset": "ddp", "mesh": {"pp": 2}, "accumulate": 4, "pipeline": {"schedule": schedule}}

    def rank(world: sw.World) -> None:
        model = models[world.rank]
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            own = list(model.parameters())
            for step in range(3):  # recorded, and then followed
                taken[f"rank {world.rank}"] = 0
                for layer in model:
                    layer.num_left, layer.flats = 4, inside.flats(engine)
                engine.forward_backward(x, loss_fn=lambda y: y.square().mean())
                if step:
                    assert taken[f"rank {world.rank}"] == num_taken[world.rank] * len(own)
                with torch._C.DisableTorchFunctionSubclass():
                    assert all(param.grad is None for param in own)
                for name, param in layers.named_parameters():
                    torch.testing.assert_close(engine.get(name, "grad"), param.grad)
                engine.zero_grad()

    run_ranks(2, rank)
