"""Sharding a model again, for the ranks of another world, and the mesh of its plan there."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import nn

from shardwise.checkpoint import Held, Parts, TrainingState
from shardwise.comm import World
from shardwise.elastic.stage_buffers import RanksBuffers, share_buffers
from shardwise.errors import ConfigError
from shardwise.memory import DiskMemory, Unit, choose_units, make_units, unit_specs
from shardwise.optim import Cooperative, vet
from shardwise.parallel.conversions import conversions_of, convert
from shardwise.parallel.experts import expert_split
from shardwise.parallel.model_axes import Boxes, boxes_for, rows_for, split_of
from shardwise.parallel.outline import SmallerMeshes
from shardwise.parallel.pipeline import holders_of, stage_boxes, stage_layout
from shardwise.plan import Plan
from shardwise.plan.mesh import STAGE_AXIS, Mesh, place_along
from shardwise.plan.placement import mesh_for
from shardwise.plan.replica_groups import axes_of_group, mesh_of
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.sharding import Design, Sharding, Updates, units_of_stages
from shardwise.sharded.state import Former, dealt_out, move, trained_as_before


def take_down(sharded: ShardedModel) -> None:
    """Return model and optimizers to their plain form, wherever a fault interrupted their step."""
    if sharded.is_taken_down:
        return
    if sharded.disk is not None:
        sharded.disk.abandon()  # while what it reads into is still there
        sharded.disk.drop_temporary()
    if sharded.parts.optimizer is not None:
        sharded.parts.optimizer.updates.withdraw_gradients()
    sharded.take_down()


def make_plain(former: Former) -> None:
    """Give the model of `former`, taken down, its modules and the shapes of its parameters back, without their values,
    which other ranks have."""
    _unsplit(former.sharding)
    _unstage(former)
    for optimizer in former.optimizers:
        without_states(optimizer)


def without_states(optimizer: torch.optim.Optimizer, num_steps: int = 0) -> None:
    """Drop all states of `optimizer`: those that come have seen `num_steps` steps."""
    if isinstance(optimizer, Cooperative):
        optimizer.begin_again(num_steps)
    else:
        optimizer.state = defaultdict(dict)


def steps_seen_by(optimizer: torch.optim.Optimizer) -> int:
    """Those that its states have seen, if its updates change with them."""
    return optimizer.num_steps if isinstance(optimizer, Cooperative) else 0


def _unsplit(sharding: Sharding) -> None:
    """Give the modules that are split, and all parameters, their plain form back, without values."""
    for split in (sharding.split, sharding.experts):
        if split is not None:
            split.undo()
    sharding.shared_buffers.clear()
    for flat in sharding.flats:
        flat.give_back_shapes()


def _unstage(former: Former) -> None:
    """Put the modules of other stages back."""
    former.sharding.converted.undo()
    if former.sharding.staged is not None:
        former.sharding.staged.undo()


def rebuilt(former: Former, plan: Plan, held: Held, world: World, buffers: Sequence[RanksBuffers] = ()) -> ShardedModel:
    """The model of `former`, taken down, sharded by `plan` on `world` and filled from `held`, and where ranks get other
    stages from `buffers`. All ranks call.

    The world consists of whole replica groups, in the order of the mesh (`Membership.needs_groups`), and each rank that
    was there before has its place in its group. Or it is a smaller mesh, or one that was smaller before: then the model
    is split anew.
    """
    former = _with_updates_to_come(former, held, world.rank)
    plan = plan_on(plan, world.size, world.local_size, former.sharding.smaller)
    mesh = mesh_for(plan, world.size, world.local_size)
    before = held.flats[0][0].mesh
    with ExitStack() as undoing:  # another rank is lost: the next attempt begins with the model in its plain form
        if not held.changes_parts(mesh):
            if former.sharding.split is not None:
                former.sharding.split.undo()  # it communicates in the former world
        elif before.has_stages or mesh.has_stages:
            return _in_other_stages(former, plan, held, world, buffers, undoing)
        else:
            _unsplit(former.sharding)
            former = replace(former, sharding=replace(former.sharding, split=None, experts=None, boxes={}))
            held = replace(held, parts=_parts_before_and_after(former, plan, held, mesh))
        with trained_as_before(former.sharding.flats, exactly=True):
            designed = former.sharding.design_on(former.model, plan, world)
            return _moved(former, designed, held, world, undoing)


def _with_updates_to_come(former: Former, held: Held, rank: int) -> Former:
    """`former`, whose optimizers have no states (an interrupted attempt may have left some) and update as they will
    after those of `held`: some change with the number of steps, of which one may have been undone."""
    updates = dict(former.sharding.updates)
    names = {param: name for name, param in former.model.named_parameters()}
    for optimizer in former.optimizers:
        if not (isinstance(optimizer, Cooperative) and optimizer.changes_update):
            without_states(optimizer)
            continue
        every = [(param, group) for _, param, group in optimizer.members() if param in updates]
        seen = [int(held.values.get(names[param], {}).get("step", 0)) for param, _ in every]
        is_new = not held.stands_for[rank]  # then the others have said how many there were
        without_states(optimizer, optimizer.num_steps if is_new else max(seen, default=0))
        updates |= {param: optimizer.update_of(param, group) for param, group in every}
    return replace(former, sharding=replace(former.sharding, updates=updates))


def _in_other_stages(
    former: Former, plan: Plan, held: Held, world: World, buffers: Sequence[RanksBuffers], undoing: ExitStack
) -> ShardedModel:
    """Where ranks get other pipeline stages than they had. What was trained of those that others had, they say."""
    model, optimizers = former.model, former.optimizers
    _unsplit(former.sharding)
    _unstage(former)
    share_buffers(model, buffers, world)
    planned, now = _trained(former, held, world)
    params = dict(model.named_parameters())
    undoing.callback(_set_trained, params, {name: param.requires_grad for name, param in params.items()})
    _set_trained(params, {name: name in planned for name in params})
    converted = convert(model, conversions_of(plan, model))
    undoing.callback(converted.undo)
    updates: Updates = vet(optimizers, model)
    bare = replace(former.sharding, stage_design=None, split=None, experts=None, boxes={})  # nothing of the former mesh
    bare = replace(bare, converted=converted, updates=updates)
    former = replace(former, sharding=bare)
    designed = bare.design_on(model, plan, world)
    held = replace(held, parts=_parts_before_and_after(former, plan, held, designed.mesh))
    if designed.stages is not None:
        designed = designed.in_stages(model, optimizers, world.rank, keeps_others=True)
        assert designed.staged is not None
        undoing.callback(designed.staged.undo)
        bare = replace(bare, converted=converted.within(model), updates=designed.own(updates))
        former = replace(former, sharding=bare)
    renewed = _moved(former, designed, held, world, undoing)
    if designed.staged is not None:
        designed.staged.free_others(renewed.parts.sharding.device)
    _set_trained(params, now)
    return renewed


def _set_trained(params: Mapping[str, nn.Parameter], are_trained: Mapping[str, bool]) -> None:
    for name, is_trained in are_trained.items():
        params[name].requires_grad_(is_trained)


def _trained(former: Former, held: Held, world: World) -> tuple[set[str], dict[str, bool]]:
    """The parameters that have memory for gradients and states in the layout of `held`, and whether those that some
    rank had, which its loop may have frozen since, or unfrozen, have gradients now. All ranks call."""
    flags = {name: param.requires_grad for name, param in former.model.named_parameters()}
    had = [slot.name for _, slots in held.flats for slot in slots] if held.stands_for[world.rank] else []
    own = {"planned": sorted(held.trained), "now": {name: flags[name] for name in had}}
    told = [json.loads(one) for one in world.exchange(json.dumps(own).encode(), "trained parameters")]
    planned = {name for one in told for name in one["planned"]}
    return planned, {name: is_trained for one in told for name, is_trained in one["now"].items()}


def _moved(former: Former, designed: Design, held: Held, world: World, undoing: ExitStack) -> ShardedModel:
    """`undoing` is closed if it fails."""
    dealt = dealt_out(former.model, former.sharding.experts, designed)
    belongings = TrainingState(held, world, dealt)
    if designed.split is not None:
        undoing.callback(designed.split.undo)
    fitted = (former.sharding.fitted, former.sharding.budget)
    disk = _disk_for(former, designed, world)
    if disk is not None and disk is not former.sharding.disk:
        undoing.callback(disk.close)
    renewed = move(former, designed, belongings, world, fitted=fitted, disk=disk)
    undoing.callback(take_down, renewed)
    if disk is not None:
        disk.agree(world, belongings.fault, "change of plan", loses_rank=True)
    renewed.parts.runner.step.restore_params()
    undoing.pop_all()
    return renewed


def _disk_for(former: Former, designed: Design, world: World) -> DiskMemory | None:
    """For rows on a disk in the new layout, beside those of the former one."""
    sharding = former.sharding
    return designed.open_disk(world, former.model, sharding.device, sharding.updates, sharding.disk, recovers=True)


def _parts_before_and_after(former: Former, plan: Plan, held: Held, mesh: Mesh) -> tuple[Parts, Parts]:
    return _parts(former, plan, held.flats[0][0].mesh), _parts(former, plan, mesh)


def _parts(former: Former, plan: Plan, mesh: Mesh) -> Parts:
    """The flat buffers of each part of the model, which is plain, on `mesh`; they allocate no memory. What stages do
    not change is found once for all of them."""
    model, sharding = former.model, former.sharding
    chosen = choose_units(model, plan)
    holders = holders_of(model, stage_layout(model, plan, mesh)) if mesh.has_stages else None
    named = dict(model.named_parameters())
    within = [axis for axis in mesh.parted_axes if axis != STAGE_AXIS]
    places = {place_along(mesh, mesh.parted_axes, rank): rank for rank in range(mesh.world_size)}
    alike = {place_along(mesh, within, rank): rank for rank in places.values()}
    rows = {place: rows_for(model, plan, mesh, expert_split(model, plan, mesh, rank)) for place, rank in alike.items()}
    boxes = {place: boxes_on(model, plan, mesh, rank) for place, rank in alike.items()}

    def units_on(rank: int) -> list[Unit]:
        place, coordinate = place_along(mesh, within, rank), mesh.coordinate(rank)
        own, own_boxes = chosen, boxes[place]
        if holders is not None:
            own = units_of_stages(chosen, holders, coordinate[STAGE_AXIS])
            own_boxes = stage_boxes(named, holders, coordinate[STAGE_AXIS], own_boxes)
        choices = [replace(choice, boxes=own_boxes) for choice in own]
        specs = unit_specs(choices, rows[place], mesh, sharding.updates)
        return make_units(choices, specs, rows[place], coordinate, sharding.device, sharding.updates)

    return {
        place: [(flat.spec, flat.slots) for unit in units_on(rank) for flat in unit.flats]
        for place, rank in places.items()
    }


def boxes_on(model: nn.Module, plan: Plan, mesh: Mesh, rank: int) -> Boxes:
    """The parts of parameters that `rank` of `mesh` has of `model`, which is plain."""
    experts = expert_split(model, plan, mesh, rank)
    return boxes_for(model, mesh, rank, split_of(model, plan, mesh, rank, experts), experts)


def with_group_sizes(plan: Plan, before: Mapping[str, int], num_ranks: int) -> Plan:
    """`plan` with the size of a replica group's axis in the place of -1: the one `before`, in the plan that it had, or
    what it has on `num_ranks`. Such sizes stay when the number of ranks changes."""
    axis = next((axis for axis in axes_of_group(plan.mesh or {}) if plan.mesh and plan.mesh[axis] == -1), None)
    if axis is None or plan.mesh is None:
        return plan
    size = before.get(axis, -1)
    size = size if size != -1 else Mesh.of(plan.mesh, num_ranks).size(axis)
    return plan.model_copy(update={"mesh": {**plan.mesh, axis: size}})


def plan_on(plan: Plan, num_ranks: int, local_size: int | None, smaller: SmallerMeshes) -> Plan:
    """`plan` for `num_ranks`: on their mesh, and with what ranks keep off their devices there."""
    return smaller.plan_on(on_mesh_of(plan, num_ranks, local_size, smaller), num_ranks)


def on_mesh_of(plan: Plan, num_ranks: int, local_size: int | None, smaller: SmallerMeshes) -> Plan:
    """`plan` for `num_ranks`: with its own mesh if that fits, else with that of `mesh_of`."""
    try:
        mesh_for(plan, num_ranks, local_size)
    except ConfigError:
        axes = plan.mesh or {"node": 1, "local": -1}  # without a mesh, only hosts' sizes do not fit
        mesh = mesh_of(axes, smaller.meshes, num_ranks)
        plan = plan.model_copy(update={"mesh": mesh.named_sizes})
    return plan
