"""Lightning's Trainer on our engine: `Trainer(strategy="shardwise_zero3")`, or `ShardwiseStrategy(plan)`.

Importing this module registers the names: `shardwise`, and `shardwise_<preset>` for each preset.
"""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from shardwise.errors import engines_are_made_by
from shardwise.integrations.lightning_parts import StrategyMixin, names_and_plans

engines_are_made_by("Lightning", "trainer.strategy.engine")


class ShardwiseStrategy(StrategyMixin, DDPStrategy):
    __doc__ = StrategyMixin.__doc__


StrategyRegistry.register("shardwise", ShardwiseStrategy, "shardwise with its default plan")
for _name, _preset in names_and_plans().items():
    StrategyRegistry.register(_name, ShardwiseStrategy, f"shardwise with preset {_preset}", plan=_preset)
