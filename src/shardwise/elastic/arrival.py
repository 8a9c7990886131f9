"""A rank that comes to others who train: it gets what they have, and takes part from the next step on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint import Held
from shardwise.checkpoint.codec import decode
from shardwise.comm import World
from shardwise.config import Plan
from shardwise.cuts import rows_for
from shardwise.elastic.meshes import plan_on
from shardwise.elastic.rebuild import rebuilt
from shardwise.errors import StateError
from shardwise.mesh import Mesh
from shardwise.optim import vet
from shardwise.placement import table_for
from shardwise.sharded_model import Progress, ShardedModel, scaler_for
from shardwise.sharding import Sharding, Updates, check_device
from shardwise.state import Former
from shardwise.storage import Unit, choose_units, make_unit
from shardwise.telemetry import ByteMeter


@dataclass(frozen=True)
class Came:
    """What a rank that has come was told."""

    plan: Plan
    label: int
    version: int
    void_after: int
    void_until: int
    told: dict[str, Any]
    """See `Host.told_to_those_who_come`."""
    schedules: list[list[Any]]
    """Of each optimizer the schedulers, by class and state."""
    groups: list[dict[str, Any]]
    """Settings of the optimizers' groups."""


def arrive(
    model: nn.Module,
    plan: Plan,
    optimizers: Sequence[torch.optim.Optimizer],
    world: World,
    before_change: Callable[[], None],
) -> tuple[ShardedModel, Came]:
    """Lay out `model` with the values that the others have, who lay theirs out anew meanwhile.

    The model and the optimizers have to be built as on the others, whatever their values. Raises `StateError` where
    they are not.
    """
    check_device(model, world)
    updates = vet(optimizers, model)
    messages = [json.loads(one) for one in world.exchange(b"{}", "recovery")]
    said = next((one for one in messages if one.get("came")), None)
    if said is None:
        raise StateError("Nobody of those who train has told this rank, which has come to them, what they have.")
    came = said["came"]
    mesh = Mesh.of(came["mesh"], math.prod(came["mesh"].values()))
    device = next(model.parameters()).device
    units = _units(model, plan, mesh, updates, device)
    specs = [(flat.spec, flat.slots) for unit in units for flat in unit.flats]
    held = Held(specs, tuple(map(tuple, came["stands_for"])))
    progress = Progress(num_steps=came["num_steps"], scaler=scaler_for(plan))
    if progress.scaler is not None and came["scale"] is not None:
        progress.scaler.load_state_dict(decode(came["scale"]))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, settings in zip(groups, came["groups"], strict=True):
        group.update({key: decode(value) for key, value in settings.items()})
    _take_buffers(model, decode(came["buffers"]))
    here = plan_on(plan, world.size, world.local_size)
    bare = Sharding(here, mesh, table_for(plan, mesh), updates, units, [], ByteMeter())
    former = Former(model, optimizers, bare, progress, before_change)
    sharded = rebuilt(former, plan, held, world)
    settings = [{key: decode(value) for key, value in one.items()} for one in came["groups"]]
    numbers = (said["label"], said["version"], said["void_after"], said["void_until"])
    told = Came(plan, *numbers, came["told"], came["schedules"], settings)
    return sharded, told


def _units(model: nn.Module, plan: Plan, mesh: Mesh, updates: Updates, device: torch.device) -> list[Unit]:
    """The layout that the others had, worked out from the model: it takes no memory."""
    rows = rows_for(model, plan, mesh, None)
    units = [
        make_unit(choice, rows, mesh, mesh.coordinate(0), ByteMeter(), device, updates, on_host=True)
        for choice in choose_units(model, plan)
    ]
    return [unit for unit in units if unit.flats]


def _take_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])
