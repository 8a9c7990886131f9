"""First values: models built without memory, models on the meta device, weights in files."""

from shardwise.birth.check import check_model, check_same_everywhere, check_same_settings
from shardwise.birth.first_values import FirstValues, Wishes
from shardwise.birth.meta import Init
from shardwise.birth.recorder import deferred_init

__all__ = [
    "FirstValues",
    "Init",
    "Wishes",
    "check_model",
    "check_same_everywhere",
    "check_same_settings",
    "deferred_init",
]
