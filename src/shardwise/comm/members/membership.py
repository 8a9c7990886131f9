"""A process's way from one generation of its world to the next, through the store of an elastic launcher."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import Store

from shardwise.comm.fault import Fault
from shardwise.comm.generation import Regrouped
from shardwise.comm.journal import in_words
from shardwise.comm.members.messages import News, Said
from shardwise.comm.members.post import RanksPost
from shardwise.errors import CommError, ConfigError, TurnedAwayError

if TYPE_CHECKING:
    from shardwise.comm.world import World

_BYE_SECONDS = 2
_WORD_SECONDS = 60
"""The launcher answers within milliseconds; without an answer for so long it has a defect."""


@dataclass
class Opening:
    """A generation that is about to be entered."""

    generation: int
    members: tuple[int, ...]
    rank: int
    hosts: tuple[str, ...]
    """By rank: the host of each member; empty where all are on one."""
    store: Store
    """Its keys are this generation's alone. Nobody else uses the connection."""
    watch_over: Callable[[World], None]
    """To be called with the world as soon as it can be broken off, before ranks wait for each other in it."""
    answers: SimpleQueue[object] = field(default_factory=SimpleQueue)
    """What came of it; `None` when it is over, so that whoever waits for an answer waits no longer."""
    is_over: bool = False

    def cancel(self) -> None:
        """Somebody has died. From any thread."""
        self.is_over = True
        self.answers.put(None)


class StoreMembership:
    """A `Membership` by way of a launcher's store."""

    def __init__(
        self,
        post: RanksPost,
        open_world: Callable[[Opening], World],
        *,
        folder: Path | None = None,
        first_news: int = 0,
        timeout_seconds: float = 600,
    ) -> None:
        """`open_world` opens torch's groups and the world of a generation. `first_news` is where to start to read.

        Raises `ConfigError` if a process with this number has spoken before.
        """
        self.step = 0
        self.folder = folder
        self.arrival: Regrouped | None = None
        self._post = post
        self._open_world = open_world
        self._timeout_seconds = timeout_seconds
        self._changed = threading.Condition()
        self._news: list[News] = []
        self._generation = -1
        """The last one that this process was asked to enter."""
        self._formed = -1
        self._over: dict[int, News] = {}
        self._wanted = -1
        self._has_asked = self._has_ended = False
        self._lets_in = True
        self._opening: Opening | None = None
        self._world: World | None = None
        if post.has_said():
            raise ConfigError(
                "An elastic job has one world, and this process has joined it before. Join once, and give that world "
                "to everything that takes one."
            )
        self._pid = os.getpid()
        self._thread = post.listen(first_news, self._read)
        atexit.register(self._at_exit)

    @property
    def member(self) -> int:
        return self._post.member

    @property
    def size(self) -> int:
        """Ranks of the present generation; 0 between two."""
        world = self._world
        return 0 if world is None else world.size

    def changes_wanted(self) -> bool:
        return self._wanted == self._generation

    def leave(self) -> None:
        """See `Membership`. May be called by a signal handler: the word goes out from a thread of its own."""
        if not self._has_asked:
            self._has_asked = True
            threading.Thread(target=self._say, args=("leaving",), name="shardwise-leave", daemon=True).start()

    def needs_all(self) -> None:
        """See `Membership`."""
        self._say("whole")

    def enter(self) -> World:
        """Wait until the others let this process in. The first to call are the first generation."""
        self._say("here")
        found = self._follow(-1)
        is_first = all(origin is None for origin in found.origins)
        self.arrival = None if is_first else found
        found.world.is_newcomer = not is_first
        return found.world

    def regroup(self, world: World, told: bytes, *, lets_in: bool = True) -> Regrouped:
        """See `Membership`."""
        self._lets_in = lets_in
        fault = world.fault
        world.part()
        with self._changed:
            self._world = None
        if self._has_ended:
            raise CommError("This rank's world was closed, so it has left the job. Regroup before you close it.")
        late = fault.ranks if fault is not None and fault.kind == "timeout" else ()
        self._ready(fault.text if fault is not None else "", tuple(world.members[rank] for rank in late), told)
        return self._follow(world.generation)

    def end(self, error: BaseException | None) -> None:
        """This rank is through with the job, or raised `error`. What the others do from now on is not its business."""
        if self._has_ended:
            return
        self._has_ended = True
        with contextlib.suppress(RuntimeError):  # the launcher is gone
            self._say("raised" if error is not None else "done", "" if error is None else in_words(error))

    def _at_exit(self) -> None:
        """See [Note: threads at the end]."""
        if os.getpid() == self._pid:
            self.end(getattr(sys, "last_value", None))
            self._thread.join(_BYE_SECONDS)

    # -- from generation to generation ------------------------------------------------------------------

    def _follow(self, before: int) -> Regrouped:
        """Enter the generations that are announced, until one of them is formed."""
        while True:
            entering = self._await_announcement()
            world, error = self._open(entering)
            if world is not None and self._await_forming(entering.generation):
                break
            if world is not None:
                world.part()
            with self._changed:
                self._opening = self._world = None
            self._ready(str(error or ""))
        if before >= 0 and entering.before == ():
            raise CommError("The launcher does not know the previous generation, which is a defect of shardwise.")
        rank_before = {member: rank for rank, member in enumerate(entering.before)}
        origins = tuple(rank_before.get(member) for member in entering.members)
        lost = tuple(rank for member, rank in rank_before.items() if member not in entering.members)
        return Regrouped(world, origins, lost, self._post.told(entering.generation))

    def _open(self, entering: News) -> tuple[World | None, Exception | None]:
        """The world of a generation, unless it is over before it has begun, or could not be opened, and why."""
        number, members = entering.generation, entering.members
        rank = members.index(self.member)
        store = self._post.store_of(number)
        opening = Opening(number, members, rank, entering.hosts, store, self._watch_over)
        with self._changed:
            self._generation, self._opening = number, opening
            if number in self._over:
                opening.cancel()
        try:
            world = self._open_world(opening)
            self._say("opened")
        except (CommError, RuntimeError, OSError) as error:
            return None, error
        return world, None

    def _watch_over(self, world: World) -> None:
        with self._changed:
            self._world = world
            over = self._over.get(world.generation)
        if over is not None:
            self._break_off(world, over)

    def _await_announcement(self) -> News:
        """That of a generation after the last. Raises when there is none for this process."""
        with self._changed:
            while True:
                for news in self._news:
                    if news.kind == "entering" and news.generation > self._generation:
                        if self.member in news.members:
                            return news
                    elif news.kind == "out" and self.member in news.members:
                        raise TurnedAwayError(news.text, has_asked=self._has_asked)
                    elif news.kind == "end":
                        raise CommError(news.text)
                self._changed.wait()

    def _await_forming(self, generation: int) -> bool:
        """Whether all have entered it. The first letter that says so, or that it is over, counts for everybody."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._formed >= generation or generation in self._over, self._timeout_seconds + _WORD_SECONDS
            )
            return self._formed >= generation

    def _ready(self, fault: str, blames: tuple[int, ...] = (), told: bytes | None = None) -> None:
        with self._changed:
            self._news = [news for news in self._news if news.generation > self._generation or news.kind != "entering"]
        said = Said("ready", self.member, self._generation, self.step, fault, blames, self._timeout_seconds)
        self._post.say(replace(said, lets_in=self._lets_in), told)

    def _say(self, kind: str, text: str = "") -> None:
        pid = os.getpid()  # whoever was started for this rank may have started it in turn
        letter = Said("here", self.member, self._generation, self.step, text, (), self._timeout_seconds, pid)
        self._post.say(replace(letter, kind=kind))  # type: ignore[arg-type]

    # -- the thread that reads the news ------------------------------------------------------------------

    def _read(self, news: News) -> bool:
        """Whether more is to be read."""
        opening, world = self._take_down(news)
        names_me = self.member in news.members
        concerns_me = opening is not None and opening.generation == news.generation
        if opening is not None and concerns_me and (news.kind == "over" or (news.kind == "out" and names_me)):
            opening.cancel()
            if world is not None and world.generation == news.generation:
                self._break_off(world, news)
        if news.kind == "end" and world is not None:
            self._break_off(world, news)
        if news.kind == "leave" and names_me:
            self.leave()
        if (news.kind == "over" and concerns_me) or (news.kind == "entering" and names_me):
            self._post.say(Said("heard", self.member, news.generation, text=news.kind))
        return news.kind != "end" and not (news.kind in ("out", "bye") and names_me)

    def _take_down(self, news: News) -> tuple[Opening | None, World | None]:
        """Let whoever waits for it know it; returns what is being opened, and what is open, at this moment."""
        with self._changed:
            match news.kind:
                case "entering" | "out" | "end":
                    self._news.append(news)
                case "formed":
                    self._formed = news.generation
                case "wanted":
                    self._wanted = news.generation
                case "over":
                    self._over[news.generation] = news
            self._changed.notify_all()
            return self._opening, self._world

    def _break_off(self, world: World, over: News) -> None:
        """Wake whoever waits in it."""
        lost = tuple(rank for rank, member in enumerate(world.members) if member in over.members)
        kind = "turned away" if over.kind == "out" else "lost" if lost else "over"
        world.break_off(Fault(kind, lost, over.text, origin=world.rank, goes_on=True))
