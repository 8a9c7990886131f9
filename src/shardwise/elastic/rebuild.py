"""Sharding a model again, for the ranks of another world, and the mesh of its plan there."""

from __future__ import annotations

from collections import defaultdict

from shardwise.checkpoint import Held, TrainingState
from shardwise.comm import World
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.plan.placement import mesh_for
from shardwise.plan.replica_groups import mesh_over, regroup
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.sharding import design
from shardwise.sharded.state import Former, move, trained_as_before


def take_down(sharded: ShardedModel) -> None:
    """Return model and optimizers to their plain form, wherever a fault interrupted their step."""
    if sharded.is_taken_down:
        return
    if sharded.parts.optimizer is not None:
        sharded.parts.optimizer.updates.withdraw_gradients()
    sharded.take_down()


def rebuilt(former: Former, plan: Plan, held: Held, world: World) -> ShardedModel:
    """The model of `former`, taken down, sharded by `plan` on `world` and filled from `held`. All ranks call.

    Replica groups are single ranks here (`why_no_images` restarts other jobs), so that all members of `world` go on, in
    its order.
    """
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)  # an interrupted attempt may have left some
    regrouped = regroup(held.mesh, held.former_ranks)
    plan = plan_on(plan, regrouped.num_ranks, world.local_size)
    with trained_as_before([flat for unit in former.sharding.units for flat in unit.flats], exactly=True):
        designed = design(former.model, plan, world)
        belongings = TrainingState(held, world)
        fitted = (former.sharding.fitted, former.sharding.budget)
        renewed = move(former, designed, belongings, world, fitted=fitted)
    try:
        renewed.parts.runner.step.restore_params()
    except BaseException:  # another rank was lost: the next attempt begins with the model in its plain form again
        take_down(renewed)
        raise
    return renewed


def plan_on(plan: Plan, num_ranks: int, local_size: int | None) -> Plan:
    """`plan` with a mesh for `num_ranks`: its own if that fits, else that of `mesh_over`."""
    try:
        mesh_for(plan, num_ranks, local_size)
    except ConfigError:
        mesh = mesh_over(plan.mesh or {"node": 1, "local": -1}, num_ranks)  # without one, only hosts' sizes do not fit
        return plan.model_copy(update={"mesh": dict(zip(mesh.axes, mesh.sizes, strict=True))})
    return plan
