"""Channels between the launcher and the members of a job: keys of a store that the launcher owns.

The launcher writes its announcements to `news/0`, `news/1`, ..., each member its messages to `from/<member>/0`, ...; a
count that each message raises shows the launcher when there is something to read. A member's report to the others is
stored under a separate key, with the number of the message that it belongs to, and copied from there when the next
generation begins.

Every key is written once, and its name is part of what is sealed: an old message or report cannot be repeated in the
place of a new one.

[Note: launchers that take over] A launcher that is killed takes its store along, and the next one has an empty one. So
it publishes the last announcements again, under their numbers, and each member sends again what the launcher may not
have acted on: all since the last generation that was formed, because a launcher writes down which messages it has
acted on before it publishes anything. What is sent twice has the same key, and is read once. The same is done where
only the connection has broken, as one cannot know what has arrived.

[Note: forged messages] What a stranger writes where the next message will be, such as a copy of an earlier one, is not
there for the reader: the genuine one will replace it. Only if that has been sent before, and so was overwritten, can
the job not go on without it.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from shardwise.comm import compat
from shardwise.comm.compat import PrefixStore, Store
from shardwise.comm.members.member_messages import (
    Announcement,
    MemberMessage,
    reports_as_text,
    reports_of_text,
)
from shardwise.comm.watch.sealed_store import NotOfJobError, SealedStore
from shardwise.comm.watch.status_board import last_status
from shardwise.errors import CommError
from shardwise.system.job_token import Seal

_NUM_SENT = "num-sent"
_ALWAYS = datetime.timedelta(days=365)
_TWIN_SECONDS = datetime.timedelta(seconds=300)
_PAUSE_SECONDS = 0.1
"""Between two looks at a forged announcement."""
_LOOK_SECONDS = 0.05
"""Between two looks whether another launcher has taken over."""
_NUM_KEPT = 64
"""Announcements that a launcher which takes over publishes again. A living member that has not read one of these is
given up long before."""
_log = logging.getLogger("shardwise")
Answer = TypeVar("Answer")


def prefix_of(attempt: str) -> str:
    """The prefix of the keys of one attempt of a job."""
    return f"shardwise/members-{attempt}"


def scope_of(generation: int) -> str:
    """What the seal of a generation's board is limited to: keys and ranks mean something else in the next one."""
    return f"generation-{generation}"


def generation_prefix(attempt: str, generation: int) -> str:
    """The prefix of the keys of one generation, which torch, the watchdog and the devices write."""
    return f"{prefix_of(attempt)}/{scope_of(generation)}"


def _report_key(member: int, number: int) -> str:
    return f"report-of/{member}/{number}"


def _mark_of(key: str) -> str:
    """Where a member notes that it has written a message: a count of all would count twice what is sent again."""
    return f"sent/{key}"


def _pause() -> None:
    """Until a forged announcement may have been overwritten by the launcher's."""
    time.sleep(_PAUSE_SECONDS)


class Forged:
    """The keys that hold what no member has written, each named in one warning."""

    def __init__(self) -> None:
        self._keys: set[str] = set()

    def ignore(self, key: str) -> None:
        if key not in self._keys:
            self._keys.add(key)
            _log.warning(
                "Somebody else writes into the store of this job: what is at %s is no message of its members, or a "
                "copy of an earlier one. It is ignored. See SECURITY.md.",
                key,
            )


@dataclass
class ChannelMemory:
    """What a launcher that takes over needs of the last one's channel: see [Note: launchers that take over]."""

    recent: deque[Announcement] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    """The last announcements."""
    num_announcements: int = 0
    num_acted_on: dict[int, int] = field(default_factory=dict)
    """By member: the number of its messages that the launcher has acted on."""
    reports: dict[int, bytes] = field(default_factory=dict)
    """By member: its latest report, as it was sent."""
    shared: tuple[int, str] | None = None
    """The last generation to which reports were published, and these."""


class LauncherChannel:
    """The launcher's side. Used by one thread. The store's `RuntimeError` is not translated."""

    def __init__(self, store: Store, attempt: str, seal: Seal, memory: ChannelMemory | None = None) -> None:
        """`memory` is that of a launcher that died in this attempt; what it had published is published again."""
        self._root = store
        self._attempt = attempt
        self._seal = seal
        self._store = SealedStore(prefix_of(attempt), store, seal)
        self.memory = ChannelMemory() if memory is None else memory
        self._num_read = dict(self.memory.num_acted_on)
        self._num_sent = 0
        self._forged = Forged()
        if self.memory.shared is not None:
            self._store.set(f"reports/{self.memory.shared[0]}", self.memory.shared[1])
        first = self.num_announcements - len(self.memory.recent)
        for number, announcement in enumerate(self.memory.recent, first):
            self._store.set(f"news/{number}", announcement.to_json())

    @property
    def num_announcements(self) -> int:
        """Announcements of this attempt so far; the number of the next one."""
        return self.memory.num_announcements

    def publish(self, *announcements: Announcement, first: Callable[[], object] = lambda: None) -> None:
        """Publish announcements. `first` is called when `memory` has them and no member can have read them."""
        number = self.num_announcements
        self.memory.recent.extend(announcements)
        self.memory.num_announcements += len(announcements)
        first()
        for one in announcements:
            self._store.set(f"news/{number}", one.to_json())
            number += 1

    def read(self, members: Iterable[int]) -> list[MemberMessage]:
        """New messages of `members`, each member's in their order. Call `act_on` for each.

        Raises `CommError` for a message that is none, or was overwritten: see [Note: forged messages].
        """
        num_sent = self._store.add(_NUM_SENT, 0)
        if num_sent == self._num_sent:
            return []
        self._num_sent = num_sent
        found, forged = [], dict[str, NotOfJobError]()
        for member in members:
            while self._store.check([key := f"from/{member}/{self._num_read.get(member, 0)}"]):
                try:
                    found.append(self._message_of(member, key))
                except NotOfJobError as error:
                    forged[key] = error
                    break
                self._note_report(member)
                self._num_read[member] = self._num_read.get(member, 0) + 1
        for key, forgery in forged.items():
            if self._store.check([_mark_of(key)]):  # it was sent, and is not there any more
                raise forgery
            self._forged.ignore(key)
        return found

    def act_on(self, message: MemberMessage) -> None:
        """Count a message as acted on, so that a launcher which takes over does not read it again."""
        acted_on = self.memory.num_acted_on
        acted_on[message.member] = acted_on.get(message.member, 0) + 1

    def _message_of(self, member: int, key: str) -> MemberMessage:
        try:
            message = MemberMessage.from_json(self._store.get(key))
            if message.member != member:
                raise ValueError(f"it speaks for {message.member}")
        except ValueError as error:
            raise CommError(f"What member {member} has sent is not a message of a member: {error}.") from error
        return message

    def _note_report(self, member: int) -> None:
        """Only the report that came with the latest message that had one is kept."""
        if self._store.check([key := _report_key(member, self._num_read.get(member, 0))]):
            self.memory.reports[member] = self._store.get(key)
            self._store.delete_key(key)

    def share_reports(self, generation: int, members: Iterable[int], former: Iterable[int]) -> None:
        """Publish to a generation the reports of its `members`, by rank; only `former` members have one."""
        has_report = set(former)
        text = reports_as_text([self._report_of(member) if member in has_report else b"" for member in members])
        self.memory.shared = generation, text
        self._store.set(f"reports/{generation}", text)

    def last_status(self, rank: int, generation: int) -> str:
        """What a rank that is gone last reported in a generation; empty if nothing, or if the store is gone."""
        prefix, seal = generation_prefix(self._attempt, generation), self._seal.within(scope_of(generation))
        try:
            return last_status(self._root, rank, prefix, seal)
        except RuntimeError:
            return ""

    def forget(self, generation: int) -> None:
        """Remove the keys of a generation that is no longer used."""
        prefix = f"{generation_prefix(self._attempt, generation)}/"
        for key in self._root.list_keys():
            if (at := key.find(prefix)) >= 0:
                self._root.delete_key(key[at:])
        self._store.delete_key(f"reports/{generation}")

    def _report_of(self, member: int) -> bytes:
        try:
            return base64.b85decode(self.memory.reports.get(member, b""))
        except ValueError as error:
            raise CommError(f"The report of member {member} is damaged: {error}.") from error


@dataclass(frozen=True)
class _Sent:
    """A message that a member may have to send again."""

    number: int
    message: MemberMessage
    report: str | None


class MemberChannel:
    """One member's side."""

    def __init__(
        self,
        store: Store,
        attempt: str,
        member: int,
        seal: Seal,
        another: Callable[[], Store | None] | None = None,
    ) -> None:
        """`store` must not be used by other code; it can be cloned. `another` returns a store over a new
        connection, of the launcher of the last store or of one that has taken over from it, or `None` as long as none
        answers; without it, nobody takes over.
        """
        self.member = member
        self._attempt = attempt
        self._seal = seal
        self._another = another
        self._use(store)
        self._num_stores = 1
        self._num_sent = 0
        self._unconfirmed: list[_Sent] = []
        """See [Note: launchers that take over]."""
        self._changed = threading.Condition(threading.RLock())
        self._renewed = 0
        """The number of the last store that was found to be lost when something was sent or asked."""
        self._is_closed = False

    def _use(self, store: Store) -> None:
        self._root = store
        self._store = SealedStore(prefix_of(self._attempt), store, self._seal)

    def has_sent(self) -> bool:
        """Whether a process with this number has sent a message before. Call it before `listen`."""
        while True:
            try:
                return self._store.check([f"from/{self.member}/0"])
            except RuntimeError:
                if self._follow_the_next() is None:
                    raise

    def send(self, message: MemberMessage, report: bytes | None = None) -> None:
        """Send `message`, after storing a `report` for the other members. From any thread, but not from a signal
        handler. While there is no launcher, the next one gets it."""
        with self._changed:
            text = None if report is None else base64.b85encode(report).decode()
            sent = _Sent(self._num_sent, message, text)
            self._num_sent += 1
            self._unconfirmed.append(sent)
            try:
                self._put(sent)
            except RuntimeError:
                if self._another is None:
                    raise
                self._renew()

    def _put(self, sent: _Sent) -> None:
        if sent.report is not None:
            self._store.set(_report_key(self.member, sent.number), sent.report)
        self._store.set(key := f"from/{self.member}/{sent.number}", sent.message.to_json())
        self._store.add(_mark_of(key), 1)
        self._store.add(_NUM_SENT, 1)

    def confirm(self, generation: int) -> None:
        """`generation` was formed, so the launcher has acted on what this member sent until it entered it."""
        with self._changed:
            for index, sent in enumerate(self._unconfirmed):
                if sent.message.kind == "opened" and sent.message.generation == generation:
                    del self._unconfirmed[: index + 1]
                    return

    def reports(self, generation: int) -> tuple[bytes, ...]:
        """The reports of the members of `generation`, by rank."""
        text = self._asked(lambda: self._store.get(f"reports/{generation}"))
        try:
            return reports_of_text(text)
        except ValueError as error:
            raise CommError(f"The reports to generation {generation} are damaged: {error}.") from error

    def _asked(self, question: Callable[[], Answer]) -> Answer:
        """The answer of the launcher's store, or of that of the launcher that takes over."""
        with self._changed:
            while True:
                number = self._num_stores
                try:
                    return question()
                except CommError:
                    raise
                except RuntimeError:
                    if self._another is None:
                        raise
                    self._renew()
                    self._changed.wait_for(lambda: self._is_closed or self._num_stores != number)  # noqa: B023
                    if self._is_closed:
                        raise

    def store_of(self, generation: int) -> Store:
        """The store in which its members meet, over a connection of its own."""
        return self._meeting(generation, self._root)

    def _meeting(self, generation: int, root: Store) -> Store:
        """Not under the lock, which whoever follows the next launcher needs, while a silent one lets this wait."""
        return PrefixStore(generation_prefix(self._attempt, generation), _twin(root))

    def stores_of(self, generation: int) -> Callable[[], Store | None]:
        """The same, each time that it is called after another launcher has taken over; else `None`."""
        last = 0

        def next_store() -> Store | None:
            nonlocal last
            with self._changed:
                number, root = self._num_stores, self._root
            if number == last:
                return None
            store, last = self._meeting(generation, root), number
            return store

        return next_store

    def close(self) -> None:
        """Follow no launcher that takes over from here on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def listen(
        self, first: int, read: Callable[[Announcement], bool], pause: Callable[[], object] = _pause
    ) -> threading.Thread:
        """Start a thread that calls `read` with each announcement from number `first` on, until that returns false.
        `pause` is called before a forged one is read again. The thread follows launchers that take over.

        [Note: threads at exit] A thread that returns from torch's store while Python shuts down ends the process
        (`terminate called`). So this thread must end before; the last announcement to a member serves that purpose.
        """

        def follow() -> None:
            number, store = first, None
            while True:
                try:
                    if store is None:
                        store = _twin(self._root)
                    for announcement in self._announcements(store, number, pause):
                        number += 1
                        if not read(announcement):
                            return
                except (CommError, ValueError) as error:  # forged: what follows cannot be trusted either
                    read(Announcement("end", -1, text=str(error)))
                    return
                except RuntimeError:  # the launcher is gone
                    store = self._follow_the_next()
                    if store is None:
                        return

        thread = threading.Thread(target=follow, name=f"shardwise-news-{self.member}", daemon=True)
        thread.start()
        return thread

    def _announcements(self, twin: Store, number: int, pause: Callable[[], object]) -> Iterator[Announcement]:
        prefix, forged = prefix_of(self._attempt), Forged()
        plain, store = PrefixStore(prefix, twin), SealedStore(prefix, twin, self._seal)
        while True:
            plain.wait([key := f"news/{number}"], _ALWAYS)
            is_overwritten = plain.check([f"news/{number + 1}"])  # asked first: the launcher writes in order
            try:
                announcement = Announcement.from_json(store.get(key))
            except NotOfJobError:
                if is_overwritten and _is_genuine(store, f"news/{number + 1}"):
                    raise
                forged.ignore(key)
                pause()
                continue
            yield announcement
            number += 1

    def _renew(self) -> None:
        """Follow the next launcher, or this one again, in a thread: that which reads the news has a connection of its
        own, and notices nothing if only this one has broken. Called under the lock."""
        if self._renewed != self._num_stores:
            self._renewed = self._num_stores
            threading.Thread(target=self._follow_the_next, name=f"shardwise-renew-{self.member}", daemon=True).start()

    def _follow_the_next(self) -> Store | None:
        """Send the launcher that takes over what the last one may not have acted on. Returns a connection to its store;
        `None` if none takes over, or this channel is closed. Waits without a limit: `launch/orphans.py` has one."""
        while self._another is not None:
            if (store := self._another()) is not None:
                with contextlib.suppress(RuntimeError), self._changed:  # that one may die too
                    self._use(store)
                    for sent in self._unconfirmed:
                        self._put(sent)
                    twin = _twin(store)
                    self._num_stores += 1
                    self._changed.notify_all()
                    return twin
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, _LOOK_SECONDS):
                    return None
        return None


def _twin(store: Store) -> Store:
    """The same store over a connection of its own, which is as patient as torch's are."""
    twin = compat.twin(store)
    twin.set_timeout(_TWIN_SECONDS)
    return twin


def _is_genuine(store: SealedStore, key: str) -> bool:
    try:
        store.get(key)
    except NotOfJobError:
        return False
    return True
