"""Threads as ranks of an elastic job. One that raises `Killed` is lost, and the files in its folder stay. Replacements
may join. Ranks may be on several hosts; each host has a folder that is lost with it. Ranks whose replica group has lost
one are spares, and join again with replacements."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from shardwise.comm import Host, PostOffice, ThreadTransport, Watched, World
from shardwise.comm.regrouping import Regrouped
from shardwise.errors import SpareError, TurnedAwayError
from shardwise.plan.replica_groups import GoingOn, Smaller, going_on, group_size
from shardwise.testing import prepare_operators
from tests.patience import PATIENCE

Result = TypeVar("Result")


class Killed(BaseException):
    """The library does not catch it anywhere."""


def is_collective(what: str) -> bool:
    """Whether what a fault is called with is a collective, not an action of a program."""
    return " of " in what


class Crowd:
    """The members of a job, and their generations."""

    def __init__(
        self,
        num_ranks: int,
        folder: Path | None,
        *,
        shares_memory: bool,
        num_newcomers: int = 0,
        least: int = 1,
        hosts: Sequence[str] = (),
        not_before: int = 0,
    ) -> None:
        """A newcomer starts to wait when a member dies, and is let in after `not_before` steps. `hosts` names the host
        of each member, if there are several."""
        self.folder = folder
        self.hosts = tuple(hosts)
        self.doomed: set[int] = set()
        """Members whose host is gone. They die at the next opportunity."""
        for name in set(hosts):
            self.folder_of(name).mkdir()
        self.shares_memory = shares_memory
        self.office = PostOffice()
        self.generation = 0
        self.axes: Mapping[str, int] = {}
        """Of the plan's mesh, if ranks train in replica groups."""
        self.smaller: Smaller = ()
        self._members = list(range(num_ranks))
        self._living = set(self._members)
        self._starting = [num_ranks + number for number in range(num_newcomers)]
        self._waiting: list[int] = []
        self._least, self._not_before = least, not_before
        self.is_ending = False
        """Whether a member has finished: no more newcomers are let in."""
        self._arrived: dict[int, tuple[bytes, bool]] = {}
        self._formed: list[tuple[list[int], tuple[int, ...], dict[int, bytes], PostOffice]] = []
        """Of each generation but the first: the members before and in it, their reports, and its office. A thread that
        is slow to wake finds here what was decided while it waited, in order, as a process reads announcements."""
        self._changed = threading.Condition()

    def folder_of(self, host: str) -> Path:
        assert self.folder is not None
        return self.folder / host

    def world(self, rank: int, members: Sequence[int], office: PostOffice) -> World:
        name = self.hosts[members[rank]] if self.hosts else ""
        world = World(
            rank,
            len(members),
            ThreadTransport(office, rank),
            watched=Watched(office, PATIENCE, 0.2),
            host=Host(None, name, self.shares_memory),
        )
        world.hosts = tuple(self.hosts[member] for member in members) if self.hosts else ()
        return world

    def kill_host(self, member: int) -> None:
        """Kill the host of a member: its memory is gone at once, and its ranks do nothing more that others notice."""
        with self._changed:
            host = self.hosts[member]
            dead = {one for one, name in enumerate(self.hosts) if name == host}
            self.doomed |= dead
            self._living -= dead
            folder = self.folder_of(host)
            while folder.exists():  # its ranks' threads do not die at once, and may still create files
                shutil.rmtree(folder, ignore_errors=True)
            self._changed.notify_all()

    def die(self, member: int, *, has_ended: bool) -> None:
        with self._changed:
            self._living.discard(member)
            self._waiting = [one for one in self._waiting if one != member]
            self.is_ending = self.is_ending or has_ended
            if not has_ended and self._starting:
                self._waiting.append(self._starting.pop(0))
            self._changed.notify_all()

    def changes_wanted(self, num_steps: int) -> bool:
        is_too_few = len(self._living) < self._least
        return not self.is_ending and num_steps >= self._not_before and (is_too_few or self._could_grow())

    def need(self, least: int) -> None:
        self._least = max(self._least, least)

    def _could_grow(self) -> bool:
        members, waiting = list(self._members), list(self._waiting)
        if group_size(self.axes) == 1:
            return bool(waiting)
        seats = {member: place for place, member in enumerate(members)}
        return len(going_on(self.axes, len(members), seats, waiting, self.smaller).members) > len(members)

    def enter(self, member: int) -> tuple[list[int], tuple[int, ...], dict[int, bytes], PostOffice] | None:
        """For a newcomer or a spare, what `meet` returns, once it is let in; `None` if it never is."""
        with self._changed:
            while not (self._formed and member in self._formed[-1][1]):
                if not self._living or self.is_ending:
                    return None
                self._changed.wait(1)
            return self._formed[-1]

    def meet(
        self, member: int, report: bytes, *, lets_in: bool
    ) -> tuple[list[int], tuple[int, ...], dict[int, bytes], PostOffice]:
        """The members before and now, their reports, and the office through which they communicate."""
        with self._changed:
            if member in self.doomed:
                raise Killed
            generation = self.generation
            self._arrived[member] = report, lets_in
            self._changed.notify_all()
            while self.generation == generation:
                if self._living and self._living <= set(self._arrived) and self._announce():
                    break
                assert self._changed.wait(PATIENCE), f"{self._living} were to come, {set(self._arrived)} have"
                if member in self.doomed:
                    raise Killed
            if member not in self._formed[generation][1]:
                raise SpareError("its replica group has lost a rank")
            return self._formed[generation]

    def _announce(self) -> bool:
        """Form the next generation, if there are enough members for it; see `Rendezvous`."""
        staying = [one for one in self._members if one in self._living]
        lets_in = all(self._arrived[one][1] for one in staying)
        coming = self._waiting if lets_in and not self.is_ending else []
        found = GoingOn((*staying, *coming), ())
        if group_size(self.axes) > 1:
            seats = {member: self._members.index(member) for member in staying}
            found = going_on(self.axes, len(self._members), seats, coming, self.smaller)
            assert found.members, "no replica group is whole"
        if lets_in and len(found.members) < self._least:
            return False
        before, self._members = self._members, list(found.members)
        reports = {one: self._arrived[one][0] if one in self._arrived else b"" for one in self._members}
        self._formed.append((before, tuple(self._members), reports, PostOffice()))
        self._living = set(found.members)
        self._waiting = [one for one in (*self._waiting, *found.spares) if one not in found.members]
        self._waiting = list(dict.fromkeys(self._waiting))
        self._arrived = {}
        self.generation += 1
        self._changed.notify_all()
        return True


class ThreadMembership:
    """The `Membership` of one thread."""

    arrival: Regrouped | None = None
    step = num_engines = 0
    has_several = False
    has_given_up = False
    least = 1
    most = 0
    predicted: Mapping[int, float] = {}

    def __init__(self, crowd: Crowd, member: int) -> None:
        self.crowd, self.member = crowd, member
        self.folder = crowd.folder_of(crowd.hosts[member]) if crowd.hosts else crowd.folder
        self.world: World | None = None
        """The world that this member is in now."""
        self._planted: Callable[[World], None] | None = None
        self.members: tuple[int, ...] = ()
        """Of the world that this member is in, by rank."""

    def begin(self, size: int) -> World:
        """Enter the first generation."""
        self.members = tuple(range(size))
        self.world = self.crowd.world(self.member, range(size), self.crowd.office)
        self.world.membership = self
        self.world.journal.is_elastic = True
        return self.world

    def come(self) -> World | None:
        """Wait to be let in; `None` if the others end before."""
        met = self.crowd.enter(self.member)
        if met is None:
            return None
        self.arrival = self._entered(*met)
        self.arrival.note_newcomer()
        return self.arrival.world

    def plant(self, plant: Callable[[World], None]) -> None:
        """Call `plant` for the world that this member is in, and for each that follows."""
        self._planted = plant
        if self.world is not None:
            plant(self.world)

    def changes_wanted(self) -> bool:
        return self.crowd.changes_wanted(self.step)

    def leave(self, *, must_go: bool = False) -> None:
        raise NotImplementedError

    def needs_all(self) -> None:
        assert self.has_several, "nobody starts threads again"

    def gives_up(self, when: str = "") -> None:
        self.has_given_up = True

    def needs_groups(self, axes: Mapping[str, int], smaller: Smaller = ()) -> None:
        if axes != self.crowd.axes:
            self.crowd.axes, self.crowd.smaller = dict(axes), smaller

    def prefers(self, axes: Mapping[str, int], smaller: Smaller) -> None:
        if axes == self.crowd.axes:
            self.crowd.smaller = smaller

    def needs_ranks(self, least: int) -> None:
        self.crowd.need(least)

    def tell_pace(self, size: int, step_seconds: float, error: float) -> None:
        """Nobody starts threads by it."""

    def come_back(self) -> Regrouped:
        self.world = None
        met = self.crowd.enter(self.member)
        if met is None:
            raise TurnedAwayError("the job has ended")
        found = self._entered(*met)
        found.note_newcomer()
        return found

    def end(self, error: BaseException | None) -> None:
        """Nothing to do: the thread ends."""

    def regroup(self, world: World, report: bytes, *, lets_in: bool = True) -> Regrouped:
        world.part()
        return self._entered(*self.crowd.meet(self.member, report, lets_in=lets_in))

    def _entered(
        self, before: list[int], now: tuple[int, ...], reports: dict[int, bytes], office: PostOffice
    ) -> Regrouped:
        self.members, rank = now, now.index(self.member)
        self.world = renewed = self.crowd.world(rank, now, office)
        renewed.membership = self
        renewed.journal.is_elastic = True
        renewed.generation = self.crowd.generation
        if self._planted is not None:
            self._planted(renewed)
        return Regrouped(
            renewed,
            tuple(before.index(one) if one in before else None for one in now),
            tuple(place for place, one in enumerate(before) if one not in now),
            tuple(reports[one] for one in now),
        )


def run_members(
    num_ranks: int,
    work: Callable[[World, int], Result],
    folder: Path | None,
    *,
    shares_memory: bool = True,
    num_newcomers: int = 0,
    least: int = 1,
    hosts: Sequence[str] = (),
    not_before: int = 0,
    of: type[Crowd] = Crowd,
) -> dict[int, Result]:
    """Call `work(world, member)` on threads, and return the results of the surviving ones, by member.

    With each death, one of `num_newcomers` begins to wait, and is let in after `not_before` steps. Fewer than `least`
    members wait for one to join.
    """
    prepare_operators()
    crowd = of(
        num_ranks,
        folder,
        shares_memory=shares_memory,
        num_newcomers=num_newcomers,
        least=least,
        hosts=hosts,
        not_before=not_before,
    )
    results: dict[int, Result] = {}
    failures: list[BaseException] = []

    def rank(member: int) -> None:
        membership = ThreadMembership(crowd, member)
        try:
            world = membership.begin(num_ranks) if member < num_ranks else membership.come()
            if world is not None:
                results[member] = work(world, member)
        except (Killed, TurnedAwayError):
            pass
        except BaseException as error:
            if member not in crowd.doomed:
                failures.append(error)
                raise
        finally:
            crowd.die(member, has_ended=member in results)
            if membership.world is not None and member not in results:
                membership.world.close(Killed())
                membership.world._abort()  # no thread of a dead process waits for anything

    members = range(num_ranks + num_newcomers)
    threads = [threading.Thread(target=rank, args=(member,), name=f"member {member}") for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if failures:
        raise failures[0]
    return results
