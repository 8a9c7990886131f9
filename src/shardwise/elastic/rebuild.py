"""Sharding a model again, for the ranks of another world, and the mesh of its plan there."""

from __future__ import annotations

from collections import defaultdict

from shardwise.checkpoint import Held, TrainingState
from shardwise.comm import World
from shardwise.errors import ConfigError
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import mesh_for
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
    """The model of `former`, taken down, sharded by `plan` on `world` and filled from `held`. All ranks call."""
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)  # an interrupted attempt may have left some
    plan = plan_on(plan, world.size, world.local_size)
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
    """`plan` with a mesh for `num_ranks`: its own if that fits, else one with the same axes.

    If the size of the innermost axis divides `num_ranks`, it is kept and the outermost axis gets the quotient;
    otherwise the innermost axis gets all ranks.
    """
    try:
        mesh_for(plan, num_ranks, local_size)
    except ConfigError:
        axes = tuple(plan.mesh) if plan.mesh is not None else ("node", "local")
        inner = (plan.mesh or {}).get(axes[-1], -1)
        sizes = dict.fromkeys(axes, 1)
        if len(axes) > 1 and inner > 0 and num_ranks % inner == 0:
            sizes[axes[0]], sizes[axes[-1]] = num_ranks // inner, inner
        else:
            sizes[axes[-1]] = num_ranks
        Mesh.of(sizes, num_ranks)
        return plan.model_copy(update={"mesh": sizes})
    return plan
