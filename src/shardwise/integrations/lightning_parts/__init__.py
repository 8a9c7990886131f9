"""Lightning strategies on our engine, for both of Lightning's packages.

`lightning.pytorch` and `pytorch_lightning` have the same code, but different classes. So the strategies are mixins,
which `shardwise.integrations.lightning` and `shardwise.integrations.pytorch_lightning` combine with their base classes.
"""

from shardwise.integrations.lightning_parts.fabric import FabricStrategyMixin
from shardwise.integrations.lightning_parts.settings import names_and_plans
from shardwise.integrations.lightning_parts.strategy import StrategyMixin
from shardwise.integrations.lightning_parts.trainer import trainer_over

__all__ = ["FabricStrategyMixin", "StrategyMixin", "names_and_plans", "trainer_over"]
