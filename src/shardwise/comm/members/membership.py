"""Membership of one process in an elastic job, through the launcher's store."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Generic

from shardwise.comm.compat import Store
from shardwise.comm.members.channels import MemberChannel
from shardwise.comm.members.member_messages import (
    TAKEN_FOR_LOST,
    Announcement,
    MemberMessage,
    MemberMessageKind,
    meshes_as_text,
)
from shardwise.comm.members.pace import Pace
from shardwise.comm.regrouping import Regrouped, W
from shardwise.comm.watch.fault import Fault
from shardwise.comm.watch.journal import in_words
from shardwise.errors import CommError, ConfigError, SpareError, TurnedAwayError

_BYE_SECONDS = 2
_ANSWER_SECONDS = 60
"""The launcher answers within milliseconds; without an answer for this long it has a defect."""


@dataclass
class Opening(Generic[W]):
    """A generation that is about to be entered."""

    generation: int
    members: tuple[int, ...]
    rank: int
    hosts: tuple[str, ...]
    """By rank: the host of each member; empty if all are on one."""
    store: Store
    """Its keys are used by this generation only, its connection by this opening only."""
    stores: Callable[[], Store | None]
    """The same keys over another connection, for the board: at first, and when a launcher has taken over; else
    `None`."""
    watch_over: Callable[[W], None]
    """Must be called with the world as soon as it can be interrupted, before ranks wait for each other in it."""
    answers: SimpleQueue[object] = field(default_factory=SimpleQueue)
    """The result of opening it; `None` if it is over, to release the thread that waits for the result."""
    is_over: bool = False

    def cancel(self) -> None:
        """Give the generation up, because a member has died. From any thread."""
        self.is_over = True
        self.answers.put(None)


class StoreMembership(Generic[W]):
    """A `Membership` through a launcher's store."""

    def __init__(
        self,
        channel: MemberChannel,
        open_world: Callable[[Opening[W]], W],
        *,
        folder: Path | None = None,
        first_announcement: int = 0,
        timeout_seconds: float = 600,
        least: int = 1,
        most: int = 0,
    ) -> None:
        """`open_world` opens torch's groups and the world of a generation. `first_announcement` is the number of the
        first announcement to read, `least` the fewest ranks that the job continues with, `most` the most to which it
        grows by itself.

        Raises `ConfigError` if a process with this number has sent a message before.
        """
        self.step = 0
        self.num_engines, self.has_several = 0, False
        self.predicted: Mapping[int, float] = {}
        self.folder = folder
        self.least, self.most = least, most
        self._least_of_job = least
        self.arrival: Regrouped[W] | None = None
        self._channel = channel
        self._open_world = open_world
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._announcements: list[Announcement] = []
        self._generation = -1
        """The last generation that this process was asked to enter."""
        self._formed = -1
        self._over: dict[int, Announcement] = {}
        self._wanted = -1
        self._spare_since = -1
        """The generation after which this process became a spare last."""
        self._is_spare = False
        self._has_asked = self._has_ended = False
        self._asking: list[threading.Thread] = []
        """Threads that send requests to leave."""
        self._lets_in = True
        self._opening: Opening[W] | None = None
        self._world: W | None = None
        if channel.has_sent():
            raise ConfigError(
                "An elastic job has one world, and this process has joined it before. Join once, and give that world "
                "to everything that takes one."
            )
        self._pid = os.getpid()
        self._thread = channel.listen(first_announcement, self._read)
        atexit.register(self._at_exit)

    @property
    def member(self) -> int:
        return self._channel.member

    @property
    def size(self) -> int:
        """Ranks of the current generation; 0 between two generations."""
        world = self._world
        return 0 if world is None else world.size

    def changes_wanted(self) -> bool:
        return self._wanted == self._generation

    def leave(self, *, must_go: bool = False) -> None:
        """See `Membership`. May be called by a signal handler, because a separate thread sends the message."""
        if must_go or not self._has_asked:
            self._has_asked = True
            message = ("leaving", "must go" if must_go else "")
            thread = threading.Thread(target=self._send, args=message, name="shardwise-leave", daemon=True)
            thread.start()
            self._asking.append(thread)

    def needs_all(self) -> None:
        """See `Membership`."""
        self._send("needs_all")

    def gives_up(self, when: str = "") -> None:
        """See `Membership`."""
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            self._send("gives_up", when)

    def needs_groups(self, axes: Mapping[str, int], smaller: Sequence[Mapping[str, int]] = ()) -> None:
        """See `Membership`."""
        self._send("groups", meshes_as_text(axes, smaller))

    def prefers(self, axes: Mapping[str, int], smaller: Sequence[Mapping[str, int]]) -> None:
        """See `Membership`."""
        self._send("prefers", meshes_as_text(axes, smaller))

    def needs_ranks(self, least: int) -> None:
        """See `Membership`."""
        self.least = max(self._least_of_job, least)
        self._send("least", str(least))

    def tell_pace(self, size: int, step_seconds: float, error: float) -> None:
        """See `Membership`."""
        if not self.most:
            return
        with contextlib.suppress(RuntimeError):  # the launcher is gone; training does not wait for it
            self._send("pace", Pace(size, step_seconds, error, self.predicted).to_text())

    def enter(self) -> W:
        """Wait until this process is admitted. The first callers are the first generation."""
        self._send("here")
        found = self._enter_next(-1)
        is_first = all(origin is None for origin in found.origins)
        self.arrival = None if is_first else found
        if not is_first:
            found.note_newcomer()
        return found.world

    def regroup(self, world: W, report: bytes, *, lets_in: bool = True) -> Regrouped[W]:
        """See `Membership`."""
        self._lets_in = lets_in
        fault = world.fault
        world.part()
        with self._changed:
            self._world = None
        if self._has_ended:
            raise CommError("This rank's world was closed, so it has left the job. Regroup before you close it.")
        while self._asking:  # otherwise the launcher could announce the next generation before it knows of the request
            self._asking.pop().join()
        at_fault = tuple(world.members[rank] for rank in fault.ranks) if fault is not None else ()
        self._send_ready(
            fault.text if fault is not None else "",
            at_fault=at_fault if fault is not None and fault.kind == "timeout" else (),
            cut_off=at_fault if fault is not None and fault.kind == "disconnected" else (),
            report=report,
        )
        return self._enter_next(world.generation)

    def come_back(self) -> Regrouped[W]:
        """See `Membership`."""
        found = self._enter_next(-1)
        self._is_spare = False
        found.note_newcomer()
        return found

    def end(self, error: BaseException | None) -> None:
        """See `Membership`. What the others do from here on does not concern this rank."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            self._send("raised" if error is not None else "done", "" if error is None else in_words(error))

    def _at_exit(self) -> None:
        """See [Note: threads at exit]."""
        if os.getpid() == self._pid:
            self.end(getattr(sys, "last_value", None))
            self._thread.join(_BYE_SECONDS)
            self._channel.close()

    # -- from generation to generation ------------------------------------------------------------------

    def _enter_next(self, before: int) -> Regrouped[W]:
        """Enter announced generations until one of them is formed."""
        while True:
            entering = self._await_announcement()
            world, error = self._open(entering)
            if world is not None and self._await_formed(entering.generation):
                break
            if world is not None:
                world.part()
            with self._changed:
                self._opening = self._world = None
            self._send_ready(str(error or ""))
        if before >= 0 and entering.before == ():
            raise CommError("The launcher does not know the previous generation, which is a defect of shardwise.")
        rank_before = {member: rank for rank, member in enumerate(entering.before)}
        origins = tuple(rank_before.get(member) for member in entering.members)
        lost = tuple(rank for member, rank in rank_before.items() if member not in entering.members)
        return Regrouped(world, origins, lost, self._channel.reports(entering.generation))

    def _open(self, entering: Announcement) -> tuple[W | None, Exception | None]:
        """The world of a generation; or `None` and the error, if it is over already or could not be opened."""
        number, members = entering.generation, entering.members
        rank = members.index(self.member)
        try:
            store = self._channel.store_of(number)
        except (RuntimeError, OSError) as error:  # the launcher is gone, and the next one begins another generation
            with self._changed:
                self._generation = number
            return None, error
        stores = self._channel.stores_of(number)
        opening = Opening(number, members, rank, entering.hosts, store, stores, self._watch_over)
        with self._changed:
            self._generation, self._opening = number, opening
            if number in self._over:
                opening.cancel()
        try:
            world = self._open_world(opening)
            self._send("opened")
        except (CommError, RuntimeError, OSError) as error:
            return None, error
        return world, None

    def _watch_over(self, world: W) -> None:
        with self._changed:
            self._world = world
            over = self._over.get(world.generation)
        if over is not None:
            self._interrupt(world, over)

    def _await_announcement(self) -> Announcement:
        """The announcement of the next generation. Raises if there is none with this process, because it was stopped,
        or its host cut off, until the others had formed one without it, or because it has become a spare."""
        with self._changed:
            while True:
                for announcement in self._announcements:
                    if self._lets_enter(announcement):
                        return announcement
                self._changed.wait()

    def _lets_enter(self, announcement: Announcement) -> bool:
        """Whether it is that of the next generation. Raises as `_await_announcement` does."""
        kind, concerns_me = announcement.kind, self.member in announcement.members
        if kind == "entering" and announcement.generation > self._generation:
            if not concerns_me and self._generation >= 0 and not self._is_spare:
                raise TurnedAwayError(TAKEN_FOR_LOST)
            return concerns_me
        if kind == "spare" and concerns_me and announcement.generation > self._spare_since:
            self._spare_since, self._is_spare = announcement.generation, True
            raise SpareError(announcement.text)
        if kind == "out" and concerns_me:
            raise TurnedAwayError(announcement.text, has_asked=self._has_asked)
        if kind == "end":
            raise CommError(announcement.text)
        return False

    def _await_formed(self, generation: int) -> bool:
        """Whether all members have entered it. The first announcement that it is formed or over is final for all."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._formed >= generation or generation in self._over, self._timeout_seconds + _ANSWER_SECONDS
            )
            return self._formed >= generation

    def _send_ready(
        self,
        fault: str,
        *,
        at_fault: tuple[int, ...] = (),
        cut_off: tuple[int, ...] = (),
        report: bytes | None = None,
    ) -> None:
        with self._changed:
            self._announcements = [
                one for one in self._announcements if one.generation > self._generation or one.kind != "entering"
            ]
        message = self._message("ready", fault)
        self._channel.send(replace(message, at_fault=at_fault, cut_off=cut_off, lets_in=self._lets_in), report)

    def _send(self, kind: MemberMessageKind, text: str = "") -> None:
        self._channel.send(self._message(kind, text))

    def _message(self, kind: MemberMessageKind, text: str) -> MemberMessage:
        return MemberMessage(
            kind,
            self.member,
            self._generation,
            self.step,
            text,
            patience_seconds=self._timeout_seconds,
            pid=os.getpid(),  # the launcher may know only the process that started this one
        )

    # -- the thread that reads announcements -------------------------------------------------------------

    def _read(self, announcement: Announcement) -> bool:
        """Act on `announcement`; returns whether more announcements must be read."""
        opening, world = self._note(announcement)
        kind, generation = announcement.kind, announcement.generation
        names_me = self.member in announcement.members
        if opening is not None and opening.generation != generation:
            opening = None  # it is of another one
        ends_here = kind == "over" or (kind == "out" and names_me)
        if opening is not None and ends_here:
            opening.cancel()
            if world is not None and world.generation == generation:
                self._interrupt(world, announcement)
        if kind == "end" and world is not None:
            self._interrupt(world, announcement)
        if kind == "leave" and names_me:
            self.leave()
        if (kind == "over" and opening is not None) or (kind == "entering" and names_me):
            self._channel.send(replace(self._message("heard", kind), generation=generation))
        return kind != "end" and not (kind in ("out", "bye") and names_me)

    def _note(self, announcement: Announcement) -> tuple[Opening[W] | None, W | None]:
        """Note `announcement` for the thread that waits for it; returns the opening and the world of this moment."""
        with self._changed:
            match announcement.kind:
                case "entering" | "spare" | "out" | "end":
                    self._announcements.append(announcement)
                case "formed":
                    self._formed = announcement.generation
                    self._channel.confirm(announcement.generation)
                case "wanted":
                    self._wanted = announcement.generation
                case "over":
                    self._over[announcement.generation] = announcement
            self._changed.notify_all()
            return self._opening, self._world

    def _interrupt(self, world: W, over: Announcement) -> None:
        """Raise a fault in `world`, which wakes all threads that wait in it."""
        lost = tuple(rank for rank, member in enumerate(world.members) if member in over.members)
        kind = "turned away" if over.kind == "out" else "lost" if lost else "over"
        world.break_off(Fault(kind, lost, over.text, origin=world.rank, goes_on=True))
