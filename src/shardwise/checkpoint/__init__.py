"""Checkpoints: sharded safetensors and a JSON index, published atomically, read by any mesh.

The reading half is imported when it is first used, because few jobs resume and all would wait for the import; and so is
what a change of plan needs.

Every checkpoint lists which elements are in which file, so any mesh reads what another wrote; `engine.reshard` finds
elements by the same functions, and sends them. An index is untrusted data, checked as a whole before any of it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.checkpoint.begun import Begun
from shardwise.checkpoint.content import Content, Entry, content_of, of_island
from shardwise.checkpoint.folder import checkpoints_in, newest, step_name
from shardwise.checkpoint.json_codec import encode
from shardwise.checkpoint.keep import Keep, numbers_of
from shardwise.checkpoint.saver import Request, Saver
from shardwise.checkpoint.wrappers import unwrapped
from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
    from shardwise.checkpoint.load import Loaded, Stateful, find
    from shardwise.checkpoint.load import load as load_checkpoint
    from shardwise.checkpoint.reshard import Held, Parts, TrainingState

__all__ = [
    "Begun",
    "Content",
    "Entry",
    "Held",
    "Keep",
    "Loaded",
    "Parts",
    "Request",
    "Saver",
    "Stateful",
    "TrainingState",
    "checkpoints_in",
    "content_of",
    "encode",
    "find",
    "load_checkpoint",
    "newest",
    "numbers_of",
    "of_island",
    "step_name",
    "unwrapped",
]

_HOMES = {
    "Held": ".reshard",
    "Loaded": ".load",
    "Parts": ".reshard",
    "Stateful": ".load",
    "TrainingState": ".reshard",
    "find": ".load",
    "load_checkpoint": ".load:load",
}

__getattr__ = imported_when_used(__name__, _HOMES)
