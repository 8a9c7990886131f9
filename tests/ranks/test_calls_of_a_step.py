"""How many Python functions of this library a step calls for each parameter, of which models have hundreds."""

from __future__ import annotations

import torch
from torch import nn

import shardwise as sw
from benchmarks.calls import OWN, calls_during
from shardwise.testing import run_ranks

FEW, MANY = 4, 24
MOST_FOR_A_PARAMETER = 2.4
"""One when its gradient arrives, and one that stores it; now and then one more looks for a late message. It was 5 while
the optimizer was given gradients, and writes were counted, by parameter."""


class Vectors(nn.Module):
    """One unit with so many parameters, between which nothing is padded."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(64) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(x * vector).sum() for vector in self.vectors]).square().mean()


def calls_of_a_step(num_params: int) -> int:
    def rank(world: sw.World) -> int:
        model = Vectors(num_params)
        optimizer = torch.optim.AdamW(model.parameters())
        with sw.shard(model, "ddp", optimizer=optimizer, world=world) as engine:

            def step() -> None:
                engine.backward(engine(torch.ones(64)))
                engine.step()

            for _ in range(3):
                step()
            return calls_during(step, within=OWN)

    return max(run_ranks(2, rank))


def test_a_parameter_costs_two_calls() -> None:
    for_a_parameter = (calls_of_a_step(MANY) - calls_of_a_step(FEW)) / (MANY - FEW)
    assert for_a_parameter <= MOST_FOR_A_PARAMETER
