"""A small model with experts, trained on ranks that share the experts, and in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from fake_devices import Devices
from torch import nn
from twins import Batch, MakeOptimizer, Run, adamw, plain_run, ranks_run

import shardwise as sw
from tests.models import Mixture

Tensor = torch.Tensor
whole_run = partial(plain_run, whole_state=True)
"""Training in one process, with whole batches and without an engine. Routers have biases that are buffers."""


def mixture(**settings: Any) -> Mixture:
    torch.manual_seed(0)
    return Mixture(**settings)


def dealt_run(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    mesh: Mapping[str, int],
    *,
    make_optimizer: MakeOptimizer = adamw,
    shares_memory: bool = True,
    devices: Devices | None = None,
    after_step: Callable[[nn.Module], None] = lambda _: None,
    after: Callable[[sw.Engine], Any] = lambda _: None,
    **plan: Any,
) -> Run:
    """The same training on the ranks of `mesh`, each with one of `devices` if they are given. `extra` has what `after`
    returned on each rank."""
    asked = {"preset": preset, "mesh": dict(mesh), **plan}
    how: dict[str, Any] = {"shares_memory": shares_memory} if devices is None else {"run": devices.run}
    how["after_step"] = lambda engine: after_step(engine.module)
    runs = ranks_run(model, data, asked, make_optimizer, after=after, **how)
    runs[0].extra = [run.extra for run in runs]
    return runs[0]
