"""The worlds that strategies of Lightning join: when they are closed, and by whom."""

from __future__ import annotations

import gc

import pytest

import shardwise as sw
from shardwise.integrations.lightning_parts.worlds import Worlds


class Joined:
    """Stands for a world that a process has joined with others."""

    is_open = True

    def close(self) -> None:
        assert self.is_open
        self.is_open = False


class User:
    """A strategy or an engine, which cycles keep alive."""

    def __init__(self) -> None:
        self.itself = self


def test_the_next_to_join_closes_what_nothing_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no finalizer does: a collection of garbage may run it while its thread holds any lock."""
    monkeypatch.setattr(sw.World, "join", lambda environment: Joined())
    worlds = Worlds()
    strategy, engine, other = User(), User(), User()
    world = worlds.join({}, strategy)
    worlds.use(world, engine)
    del strategy
    gc.collect()
    second = worlds.join({}, other)
    assert world.is_open  # the engine has outlived its Trainer
    del engine
    gc.collect()
    assert world.is_open
    third = worlds.join({}, other)
    assert [one.is_open for one in (world, second, third)] == [False, True, True]
    worlds.close()
    assert [one.is_open for one in (world, second, third)] == [False] * 3
