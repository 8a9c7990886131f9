"""Sharding a model again, for the surviving ranks."""

from __future__ import annotations

from collections import defaultdict

from shardwise.checkpoint import Held, TrainingState
from shardwise.comm import World
from shardwise.config import Plan
from shardwise.elastic.meshes import plan_on
from shardwise.sharded_model import ShardedModel
from shardwise.sharding import design
from shardwise.state import Former, move, trained_as_before


def take_down(sharded: ShardedModel) -> None:
    """Return model and optimizers to their plain form, wherever a fault interrupted their step."""
    if sharded.is_taken_down:
        return
    if sharded.optimizer is not None:
        sharded.optimizer.updates.withdraw_gradients()
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
        renewed.runner.step.restore_params()
    except BaseException:  # another rank was lost: the next attempt begins with the model in its plain form again
        take_down(renewed)
        raise
    return renewed
