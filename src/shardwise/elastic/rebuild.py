"""Sharding a model again, for the ranks of another world, and the mesh of its plan there."""

from __future__ import annotations

from collections import defaultdict

from shardwise.checkpoint import Held, TrainingState
from shardwise.comm import World
from shardwise.errors import ConfigError
from shardwise.memory import give_back_shapes
from shardwise.plan import Plan
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.placement import mesh_for
from shardwise.plan.replica_groups import mesh_over
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import Former, dealt_out, move, trained_as_before


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
    for split in (sharding.split, sharding.experts):
        if split is not None:
            split.undo()
    sharding.converted.undo()
    sharding.shared_buffers.clear()
    for flat in (flat for unit in sharding.units for flat in unit.flats):
        give_back_shapes(flat)
    if sharding.staged is not None:
        sharding.staged.undo()
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)


def rebuilt(former: Former, plan: Plan, held: Held, world: World) -> ShardedModel:
    """The model of `former`, taken down, sharded by `plan` on `world` and filled from `held`. All ranks call.

    The world consists of whole replica groups, in the order of the mesh (`Membership.needs_groups`), and each rank that
    was there before has its place in its group.
    """
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)  # an interrupted attempt may have left some
    plan = plan_on(plan, world.size, world.local_size)
    split = former.sharding.split
    if split is not None:
        split.undo()  # it communicates in the former world
    with trained_as_before([flat for unit in former.sharding.units for flat in unit.flats], exactly=True):
        designed = former.sharding.design_on(former.model, plan, world)
        dealt = dealt_out(former.model, former.sharding.experts, designed)
        belongings = TrainingState(held, world, dealt)
        fitted = (former.sharding.fitted, former.sharding.budget)
        renewed = move(former, designed, belongings, world, fitted=fitted)
    try:
        renewed.parts.runner.step.restore_params()
    except BaseException:  # another rank was lost: the next attempt begins with the model in its plain form again
        take_down(renewed)
        raise
    return renewed


def with_group_sizes(plan: Plan, mesh: Mesh) -> Plan:
    """`plan` with the sizes of `mesh` along the axes of replica groups. They stay when the number of ranks changes,
    one that is -1 included."""
    if plan.mesh is None or all(plan.mesh.get(axis) != -1 for axis in MODEL_AXES):
        return plan
    sizes = {axis: mesh.size(axis) if axis in MODEL_AXES else size for axis, size in plan.mesh.items()}
    return plan.model_copy(update={"mesh": sizes})


def plan_on(plan: Plan, num_ranks: int, local_size: int | None) -> Plan:
    """`plan` with a mesh for `num_ranks`: its own if that fits, else that of `mesh_over`."""
    try:
        mesh_for(plan, num_ranks, local_size)
    except ConfigError:
        mesh = mesh_over(plan.mesh or {"node": 1, "local": -1}, num_ranks)  # without one, only hosts' sizes do not fit
        return plan.model_copy(update={"mesh": dict(zip(mesh.axes, mesh.sizes, strict=True))})
    return plan
