"""A model laid out anew for the ranks that are left."""

from __future__ import annotations

from collections import defaultdict

from shardwise.checkpoint import Held, TrainingState
from shardwise.comm import World
from shardwise.config import Plan
from shardwise.elastic.meshes import plan_on
from shardwise.sharded_model import ShardedModel
from shardwise.sharding import design
from shardwise.state import Former, move


def take_down(sharded: ShardedModel) -> None:
    """Leave the model and the optimizers as they were given, wherever a fault has cut their step short."""
    if sharded.is_taken_down:
        return
    if sharded.optimizer is not None:
        sharded.optimizer.updates.withdraw_gradients()
    sharded.take_down()


def rebuilt(former: Former, plan: Plan, held: Held, world: World) -> ShardedModel:
    """The model of `former`, taken down, by `plan` on `world`, with what its ranks hold. All of them call."""
    for optimizer in former.optimizers:
        optimizer.state = defaultdict(dict)  # an attempt that was cut short may have left some
    plan = plan_on(plan, world.size, world.local_size)
    designed = design(former.model, plan, world)
    belongings = TrainingState(held, world)
    fitted = (former.sharding.fitted, former.sharding.budget)
    renewed = move(former, designed, belongings, world, fitted=fitted)
    renewed.runner.step.restore_params()
    return renewed
