"""Small models for pipelines, and comparisons of a pipelined model with the unsplit one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from twins import plain_run

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import LENGTH, VOCAB

Tensor = torch.Tensor


def batches(num_steps: int, rows: int, *, lengths: Sequence[int] = (LENGTH,)) -> list[tuple[Tensor, Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    drawn = []
    for step in range(num_steps):
        tokens = torch.randint(0, VOCAB, (rows, lengths[step % len(lengths)] + 1), generator=numbers)
        drawn.append((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return drawn


unsplit = partial(plain_run, whole_state=True)
"""Trains in one process with plain PyTorch and whole batches."""


def some_names(model: nn.Module) -> list[str]:
    """The name of every third parameter, including some of each block and both ends. Gathered from all stages."""
    return [name for name, _ in model.named_parameters()][::3]


def rows_of(engine: sw.Engine, tensor: Tensor) -> Tensor:
    """This rank's share of a batch; the ranks of one pipeline have the same."""
    place, num_shares = engine.mesh.data_place(engine.world.rank)
    return tensor.chunk(num_shares)[place]


def race_in_inference(
    model: nn.Module, plan: dict[str, Any], use: Callable[[Any, int], Any], keep_bytes: int | None = None
) -> None:
    """What `use` returns of the model in stages, given the place of a rank's data, equals what it returns of the
    model."""
    model.eval()
    num_ranks = math.prod(plan["mesh"].values())
    num_shares = num_ranks // math.prod(plan["mesh"].get(one, 1) for one in ("pp", "tp", "sp"))
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    expected = [use(model, place) for place in range(num_shares)]

    def rank(world: sw.World) -> tuple[int, Any]:
        with sw.shard(models[world.rank], plan, world=world) as engine:
            with torch.no_grad(), engine.inference(keep_bytes):
                found = use(engine.module, engine.data_ranks[0])
            return engine.data_ranks[0], found

    for place, found in run_ranks(num_ranks, rank):
        torch.testing.assert_close(found, expected[place], rtol=1e-5, atol=1e-5)
