"""Threads as ranks of an elastic job: one that raises `Killed` is gone, and what it had in its folder stays."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shardwise.comm import Host, PostOffice, ThreadTransport, Watched, World
from shardwise.comm.generation import Regrouped

Result = TypeVar("Result")


class Killed(BaseException):
    """Nothing of the library catches it."""


class Crowd:
    """The members of a job, and their generations."""

    def __init__(self, num_ranks: int, folder: Path | None, *, shares_memory: bool) -> None:
        self.folder = folder
        self.shares_memory = shares_memory
        self.office = PostOffice()
        self.generation = 0
        self._members = list(range(num_ranks))
        self._living = set(self._members)
        self._arrived: dict[int, bytes] = {}
        self._made: tuple[tuple[int, ...], dict[int, bytes], PostOffice] | None = None
        self._changed = threading.Condition()

    def world(self, rank: int, size: int, office: PostOffice) -> World:
        return World(
            rank,
            size,
            ThreadTransport(office, rank),
            watched=Watched(office, 30, 0.2),
            host=Host(None, "", self.shares_memory),
        )

    def die(self, member: int) -> None:
        with self._changed:
            self._living.discard(member)
            self._changed.notify_all()

    def meet(self, member: int, told: bytes) -> tuple[list[int], tuple[int, ...], dict[int, bytes], PostOffice]:
        """Members before and now, what they said, and where they meet."""
        with self._changed:
            before, generation = list(self._members), self.generation
            self._arrived[member] = told
            self._changed.notify_all()
            while self.generation == generation:
                if self._living and self._living <= set(self._arrived):
                    self._members = sorted(self._living)
                    said = {one: self._arrived[one] for one in self._members}
                    self._made = tuple(self._members), said, PostOffice()
                    self._arrived = {}
                    self.generation += 1
                    self._changed.notify_all()
                    break
                assert self._changed.wait(20), f"{self._living} were to come, {set(self._arrived)} have"
            assert self._made is not None
            return before, *self._made


class ThreadMembership:
    """One thread's `Membership`."""

    arrival = None
    step = 0

    def __init__(self, crowd: Crowd, member: int, world: World) -> None:
        self.crowd, self.member, self.folder = crowd, member, crowd.folder
        self.world = world
        """The one that this member is in now."""

    def changes_wanted(self) -> bool:
        return False

    def leave(self) -> None:
        raise NotImplementedError

    def end(self, error: BaseException | None) -> None:
        """The thread ends."""

    def regroup(self, world: World, told: bytes) -> Regrouped:
        world.part()
        before, now, said, office = self.crowd.meet(self.member, told)
        rank = now.index(self.member)
        self.world = renewed = self.crowd.world(rank, len(now), office)
        renewed.membership = self
        renewed.generation = self.crowd.generation
        return Regrouped(
            renewed,
            tuple(before.index(one) for one in now),
            tuple(place for place, one in enumerate(before) if one not in now),
            tuple(said[one] for one in now),
        )


def run_mortals(
    num_ranks: int, work: Callable[[World, int], Result], folder: Path | None, *, shares_memory: bool = True
) -> dict[int, Result]:
    """Call `work(world, member)` on threads; what those who live to the end return, by member."""
    crowd = Crowd(num_ranks, folder, shares_memory=shares_memory)
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def rank(member: int) -> None:
        world = crowd.world(member, num_ranks, crowd.office)
        world.membership = membership = ThreadMembership(crowd, member, world)
        try:
            results[member] = work(world, member)
        except Killed:
            pass
        except BaseException as error:
            failures.append(error)
            raise
        finally:
            crowd.die(member)
            if member not in results:
                membership.world.close(Killed())

    threads = [threading.Thread(target=rank, args=(member,), name=f"member {member}") for member in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if failures:
        raise failures[0]
    return results
