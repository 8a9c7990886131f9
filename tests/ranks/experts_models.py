"""A small model with experts, trained on ranks that share the experts, and in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sequences
import torch
from fake_devices import Devices
from torch import nn
from twins import Batch, MakeOptimizer, adamw

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import Mixture

Tensor = torch.Tensor


def mixture(**settings: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(**settings)


@dataclass
class Run(sequences.Run):
    extra: Any = None
    """What `after` has returned."""


def micro_batches(batch: Batch, number: int) -> list[Batch]:
    return list(zip(*(part.chunk(number) for part in batch), strict=True))


def whole_run(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    make_optimizer: MakeOptimizer = adamw,
    after_step: Callable[[nn.Module], None] | None = None,
) -> Run:
    """Training in one process, with whole batches and without an engine."""
    model = copy.deepcopy(model)
    optimizer, run = make_optimizer(model), Run()
    for batch in data:
        losses = [model(*micro) for micro in micro_batches(batch, accumulate)]
        (torch.stack(losses).sum() / accumulate).backward()
        run.losses.append(sum(loss.item() for loss in losses) / accumulate)
        run.grads.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    run.params = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return run


def whole_grads(engine: sw.Engine, model: nn.Module) -> dict[str, Tensor]:
    grads = {name: engine.get(name, "grad") for name, param in model.named_parameters() if param.requires_grad}
    return {name: grad for name, grad in grads.items() if grad is not None}


def dealt_run(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    mesh: Mapping[str, int],
    *,
    make_optimizer: MakeOptimizer = adamw,
    after_step: Callable[[nn.Module], None] | None = None,
    after: Callable[[sw.Engine], Any] | None = None,
    shares_memory: bool = True,
    devices: Devices | None = None,
    **plan: Any,
) -> Run:
    """The same training on the ranks of `mesh`, each with one of `devices` if they are given. `extra` has what `after`
    returned on each rank."""
    replicas = [copy.deepcopy(model) for _ in range(math.prod(mesh.values()))]
    settings = {"preset": preset, "mesh": dict(mesh), **plan}

    def rank(world: sw.World) -> Run:
        replica, run = replicas[world.rank], Run()
        with sw.shard(replica, settings, optimizer=make_optimizer(replica), world=world) as engine:
            share, num_shares = engine.data_ranks
            for batch in data:
                losses = []
                for micro in micro_batches(batch, engine.plan.accumulate):
                    loss = engine(*micro_batches(micro, num_shares)[share])
                    engine.backward(loss)
                    losses.append(loss.item())
                run.losses.append(engine.mean(sum(losses) / len(losses)))
                run.grads.append(whole_grads(engine, replica))
                run.norms.append(float(engine.step(is_last=True) or 0.0))
                if after_step is not None:
                    after_step(replica)
            run.params = engine.state_dict()
            run.extra = after(engine) if after is not None else None
        return run

    if devices is None:
        runs = run_ranks(len(replicas), rank, shares_memory=shares_memory)
    else:
        runs = devices.run(len(replicas), rank)
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        assert other.norms == runs[0].norms
    runs[0].extra = [run.extra for run in runs]
    return runs[0]
