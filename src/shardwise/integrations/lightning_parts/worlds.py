"""The worlds that Lightning's strategies join, closed once nothing uses them; what all strategies have of theirs.

[Note: no finalizer closes a world] An engine may outlive the Trainer that created it, so a world ends with the last of
its users. To close it is to wait for the thread of its watch, and a collection of garbage may run a finalizer in any
thread, whatever lock that holds: one that waited there could wait forever. Two fits of one Trainer have two engines in
one world, besides, of which the first may be collected while the second trains. So users are only remembered, and what
nothing uses any more is closed when a strategy joins its next world, or at interpreter exit.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping
from typing import Any

import shardwise as sw
from shardwise.integrations.lightning_parts.settings import rank_environment
from shardwise.integrations.plans import data_share

_Base: Any = object


class Worlds:
    """The worlds that this process has joined for strategies."""

    def __init__(self) -> None:
        self._users: dict[sw.World, weakref.WeakSet[object]] = {}

    def join(self, environment: Mapping[str, str], user: object) -> sw.World:
        """Join another one, for `user`, after closing those without users. Collective; raises as `World.join` does."""
        for world in [world for world, users in self._users.items() if not users]:
            self._close(world)
        world = sw.World.join(environment=environment)
        self._users[world] = weakref.WeakSet()
        self.use(world, user)
        return world

    def use(self, world: sw.World, user: object) -> None:
        """Keep `world` open for as long as `user` lives, too. It must be open."""
        self._users[world].add(user)

    def close(self) -> None:
        """Close all, in use or not: the process ends."""
        while self._users:
            self._close(next(iter(self._users)))

    def _close(self, world: sw.World) -> None:
        del self._users[world]
        world.close()


WORLDS = Worlds()
# Now, and not when the first is joined: at exit what was registered last is called first, and the watch of a world then
# tells other ranks of the exception that ended this one.
atexit.register(WORLDS.close)


class InWorld(_Base):
    """What strategies of Lightning's Trainer and of Fabric have in common: a plan, and a world of ranks."""

    plan: sw.Plan
    _own_world: sw.World | None = None

    @property
    def world(self) -> sw.World:
        """The world of ranks, joined at first use."""
        if self._own_world is None:
            self._own_world = WORLDS.join(rank_environment(self), self)
        return self._own_world

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """See Lightning. Ranks that share a batch get the same samples."""
        place, count = data_share(self.plan, self.global_rank, self.world_size)
        return {"num_replicas": count, "rank": place}
