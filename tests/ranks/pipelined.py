"""Small models for pipelines, and comparisons of a pipelined model with the unsplit one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from twins import adamw

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


@dataclass
class Told:
    """Results of a run: losses and norms of each step, gradients of the last one, final parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    def names_of(self, model: nn.Module) -> list[str]:
        """The name of every third parameter, including some of each block and both ends. Gathered from all stages."""
        return [name for name, _ in model.named_parameters()][::3]


def unsplit(
    model: nn.Module,
    data: Sequence[tuple[Tensor, Tensor]],
    *,
    clip: float | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> Told:
    """Train in one process with plain PyTorch and whole batches."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    told = Told()
    for x, y in data:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        told.grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        optimizer.step()
        told.losses.append(loss.item())
        told.norms.append(float(norm))
    told.params = {name: value.clone() for name, value in model.state_dict().items()}
    return told


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
