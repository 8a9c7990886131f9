"""Checkpoints: sharded safetensors and a JSON index, published at once, read by any mesh."""

from shardwise.checkpoint.codec import encode
from shardwise.checkpoint.content import Content, Entry, content_of
from shardwise.checkpoint.folder import checkpoints_in, newest, step_name
from shardwise.checkpoint.keep import Keep, numbers_of
from shardwise.checkpoint.load import Loaded, Stateful, find, load
from shardwise.checkpoint.reshard import TrainingState
from shardwise.checkpoint.saver import Request, Saver

__all__ = [
    "Content",
    "Entry",
    "Keep",
    "Loaded",
    "Request",
    "Saver",
    "Stateful",
    "TrainingState",
    "checkpoints_in",
    "content_of",
    "encode",
    "find",
    "load",
    "newest",
    "numbers_of",
    "step_name",
]
