"""What a strategy of Lightning does over our engine, under either of Lightning's names.

`lightning.pytorch` and `pytorch_lightning` are the same code with classes of their own, so these are mixins, which
`shardwise.integrations.lightning` and `shardwise.integrations.pytorch_lightning` put in front of theirs.
"""

from shardwise.integrations.lightning_parts.fabric import FabricStrategyMixin
from shardwise.integrations.lightning_parts.settings import names_and_plans
from shardwise.integrations.lightning_parts.strategy import StrategyMixin
from shardwise.integrations.lightning_parts.trainer import fabric_over, trainer_over

__all__ = ["FabricStrategyMixin", "StrategyMixin", "fabric_over", "names_and_plans", "trainer_over"]
