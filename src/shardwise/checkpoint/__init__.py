"""Checkpoints: sharded safetensors and a JSON index, published at once, read by any mesh."""

from shardwise.checkpoint.content import Content, Entry, content_of
from shardwise.checkpoint.load import Loaded, load, newest
from shardwise.checkpoint.save import save

__all__ = ["Content", "Entry", "Loaded", "content_of", "load", "newest", "save"]
