"""Initial values: deferred models, models on the meta device, weights in files.

Files are read by `pread`, not mapped: pages of a mapping count as the process's memory.
"""

from shardwise.init.deferred import is_deferred
from shardwise.init.different_values import Overwritten, what_is_overwritten
from shardwise.init.first_values import FirstValues, Wishes, device_for
from shardwise.init.loading import materialize
from shardwise.init.meta import Init
from shardwise.init.model_check import check_model, check_same_everywhere, check_same_settings, is_distributed
from shardwise.init.recorder import deferred_init, end_recording

__all__ = [
    "FirstValues",
    "Init",
    "Overwritten",
    "Wishes",
    "check_model",
    "check_same_everywhere",
    "check_same_settings",
    "deferred_init",
    "device_for",
    "end_recording",
    "is_deferred",
    "is_distributed",
    "materialize",
    "what_is_overwritten",
]
