"""Lightning's Fabric on our engine: `Fabric(strategy="shardwise_zero3")`, or `ShardwiseStrategy(plan)`.

Importing this module registers the names: `shardwise`, and `shardwise_<preset>` for each preset.
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy

from shardwise.errors import engines_are_made_by
from shardwise.integrations.lightning_parts import FabricStrategyMixin, names_and_plans

engines_are_made_by("Fabric", "fabric.strategy.engine_of(model)")


class ShardwiseStrategy(FabricStrategyMixin, DDPStrategy):
    __doc__ = FabricStrategyMixin.__doc__


STRATEGY_REGISTRY.register("shardwise", ShardwiseStrategy, "shardwise with its default plan")
for _name, _preset in names_and_plans().items():
    STRATEGY_REGISTRY.register(_name, ShardwiseStrategy, f"shardwise with preset {_preset}", plan=_preset)
