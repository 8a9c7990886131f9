"""Hooks to events, the recorder of the first step, and the executor of the program."""

from shardwise.runtime.buffers import BufferSync
from shardwise.runtime.compiled import check_backend
from shardwise.runtime.executor import BoundBlock, Executor
from shardwise.runtime.mover import Mover
from shardwise.runtime.runner import Runner

__all__ = ["BoundBlock", "BufferSync", "Executor", "Mover", "Runner", "check_backend"]
