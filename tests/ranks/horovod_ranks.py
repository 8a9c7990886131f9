"""Threads as Horovod's ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwise as sw
import shardwise.integrations.horovod.torch as hvd
from shardwise.testing import run_ranks


def on_ranks(size: int, work: Callable[[], Any], **options: Any) -> list[Any]:
    """Run `work()` on `size` threads as ranks, and return the results. `options` are passed to `run_ranks`."""

    def rank(world: sw.World) -> Any:
        hvd.init(world)
        try:
            return work()
        finally:
            hvd.shutdown()

    return run_ranks(size, rank, **options)
