"""Sharding a model again, for the ranks of another world, and the mesh of its plan there."""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from shardwise.checkpoint import Held, Parts, TrainingState
from shardwise.comm import World
from shardwise.errors import ConfigError
from shardwise.memory import Unit, choose_units, give_back_shapes, make_unit, unit_specs
from shardwise.parallel.model_axes import Boxes, boxes_for, rows_for, split_of
from shardwise.plan import Plan
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.placement import mesh_for
from shardwise.plan.replica_groups import Smaller, mesh_of
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.sharding import Sharding, Updates
from shardwise.sharded.state import Former, dealt_out, move, trained_as_before
from shardwise.system.telemetry import ByteMeter


def take_down(sharded: ShardedModel) -> None:
    """Return model and optimizers to their plain form, wherever a fault interrupted their step."""
    if sharded.is_taken_down:
        return
    if sharded.parts.optimizer is not None:
        sharded.parts.optimizer.updates.withdraw_gradients()
    sharded.take_down()


def make_plain(former: Former) -> None:
    """Give the model of `former`, taken down, its modules and the shapes of its parameters back, without their values,
    which other ranks have."""
    sharding = former.sharding
    _unsplit(sharding)
    sharding.converted.undo()
    if sharding.staged is not None:
        sharding.staged.undo()
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)


def _unsplit(sharding: Sharding) -> None:
    """Give the modules that are split, and all parameters, their plain form back, without values."""
    for split in (sharding.split, sharding.experts):
        if split is not None:
            split.undo()
    sharding.shared_buffers.clear()
    for flat in (flat for unit in sharding.units for flat in unit.flats):
        give_back_shapes(flat)


def rebuilt(former: Former, plan: Plan, held: Held, world: World) -> ShardedModel:
    """The model of `former`, taken down, sharded by `plan` on `world` and filled from `held`. All ranks call.

    The world consists of whole replica groups, in the order of the mesh (`Membership.needs_groups`), and each rank that
    was there before has its place in its group. Or it is a smaller mesh, or one that was smaller before: then the model
    is split anew.
    """
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)  # an interrupted attempt may have left some
    sharding = former.sharding
    plan = plan_on(plan, world.size, world.local_size, sharding.smaller.meshes)
    mesh = mesh_for(plan, world.size, world.local_size)
    is_split_anew = held.changes_parts(mesh)
    if is_split_anew:
        _unsplit(sharding)
        sharding = replace(sharding, split=None, boxes={})
        former = replace(former, sharding=sharding)
    elif sharding.split is not None:
        sharding.split.undo()  # it communicates in the former world
    with trained_as_before([flat for unit in sharding.units for flat in unit.flats], exactly=True):
        designed = sharding.design_on(former.model, plan, world)
        if is_split_anew:
            before, after = (_parts(former, plan, of) for of in (held.flats[0][0].mesh, mesh))
            held = replace(held, parts=(before, after))
        dealt = dealt_out(former.model, sharding.experts, designed)
        belongings = TrainingState(held, world, dealt)
        fitted = (sharding.fitted, sharding.budget)
        with ExitStack() as undoing:  # another rank is lost: the next attempt begins with the model in its plain form
            if designed.split is not None:
                undoing.callback(designed.split.undo)
            renewed = move(former, designed, belongings, world, fitted=fitted)
            undoing.callback(take_down, renewed)
            renewed.parts.runner.step.restore_params()
            undoing.pop_all()
    return renewed


def _parts(former: Former, plan: Plan, mesh: Mesh) -> Parts:
    """The flat buffers of each part of the model, which is plain, on `mesh`."""
    sharding = former.sharding
    places = {tuple(mesh.coordinate(rank)[axis] for axis in mesh.model_axes): rank for rank in range(mesh.world_size)}
    return {
        place: [
            (flat.spec, flat.slots)
            for unit in _units_on(former.model, plan, mesh, rank, sharding.updates, sharding.device)
            for flat in unit.flats
        ]
        for place, rank in places.items()
    }


def _units_on(
    model: nn.Module, plan: Plan, mesh: Mesh, rank: int, updates: Updates, device: torch.device
) -> list[Unit]:
    """The units and flat buffers that `rank` of `mesh` has of `model`, which is plain; they allocate no memory."""
    rows, boxes = rows_for(model, plan, mesh, None), boxes_on(model, plan, mesh, rank)
    choices = [replace(choice, boxes=boxes) for choice in choose_units(model, plan)]
    specs = unit_specs(choices, rows, mesh, updates)
    every = (
        make_unit(choice, spec, rows, mesh.coordinate(rank), ByteMeter(), device, updates)
        for choice, spec in zip(choices, specs, strict=True)
    )
    return [unit for unit in every if unit.flats]


def boxes_on(model: nn.Module, plan: Plan, mesh: Mesh, rank: int) -> Boxes:
    """The parts of parameters that `rank` of `mesh` has of `model`, which is plain."""
    return boxes_for(model, mesh, rank, split_of(model, plan, mesh, rank))


def with_group_sizes(plan: Plan, mesh: Mesh) -> Plan:
    """`plan` with the sizes of `mesh` along the axes of replica groups. They stay when the number of ranks changes,
    one that is -1 included."""
    if plan.mesh is None or all(plan.mesh.get(axis) != -1 for axis in MODEL_AXES):
        return plan
    sizes = {axis: mesh.size(axis) if axis in MODEL_AXES else size for axis, size in plan.mesh.items()}
    return plan.model_copy(update={"mesh": sizes})


def plan_on(plan: Plan, num_ranks: int, local_size: int | None, smaller: Smaller = ()) -> Plan:
    """`plan` with a mesh for `num_ranks`: its own if that fits, else that of `mesh_of`."""
    try:
        mesh_for(plan, num_ranks, local_size)
    except ConfigError:
        axes = plan.mesh or {"node": 1, "local": -1}  # without a mesh, only hosts' sizes do not fit
        mesh = mesh_of(axes, smaller, num_ranks)
        return plan.model_copy(update={"mesh": dict(zip(mesh.axes, mesh.sizes, strict=True))})
    return plan
