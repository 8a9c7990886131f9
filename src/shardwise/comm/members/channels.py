"""Channels between the launcher and the members of a job: keys of a store that the launcher owns.

The launcher writes its announcements to `news/0`, `news/1`, ..., each member its messages to `from/<member>/0`, ...; a
count of all messages shows the launcher when there is something to read. A member's report to the others is stored
under a separate key, with the number of the message that it belongs to, and copied from there when the next generation
begins.

Every key is written once, and its name is part of what is sealed: an old message or report cannot be repeated in the
place of a new one.

[Note: forged messages] What a stranger writes where the next message will be, such as a copy of an earlier one, is not
there for the reader: the genuine one will replace it. Only if that has been sent before, and so was overwritten, can
the job not go on without it.
"""

from __future__ import annotations

import base64
import datetime
import logging
import threading
import time
from collections.abc import Callable, Iterable

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
_PAUSE_SECONDS = 0.1
"""Between two looks at a forged announcement."""
_log = logging.getLogger("shardwise")


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


class LauncherChannel:
    """The launcher's side. Used by one thread. The store's `RuntimeError` is not translated."""

    def __init__(self, store: Store, attempt: str, seal: Seal) -> None:
        self._root = store
        self._attempt = attempt
        self._seal = seal
        self._store = SealedStore(prefix_of(attempt), store, seal)
        self._num_read: dict[int, int] = {}
        self._report_keys: dict[int, str] = {}
        self._num_sent = 0
        self._forged = Forged()
        self.num_announcements = 0

    def publish(self, announcement: Announcement) -> None:
        self._store.set(f"news/{self.num_announcements}", announcement.to_json())
        self.num_announcements += 1

    def read(self, members: Iterable[int]) -> list[MemberMessage]:
        """New messages of `members`, each member's in their order.

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
            if sum(self._num_read.values()) < num_sent:  # it was sent and counted, and is not there any more
                raise forgery
            self._forged.ignore(key)
        return found

    def _message_of(self, member: int, key: str) -> MemberMessage:
        try:
            message = MemberMessage.from_json(self._store.get(key))
            if message.member != member:
                raise ValueError(f"it speaks for {message.member}")
        except ValueError as error:
            raise CommError(f"What member {member} has sent is not a message of a member: {error}.") from error
        return message

    def _note_report(self, member: int) -> None:
        """Only the report that came with the latest message that had one is read, and only that one is kept."""
        if self._store.check([key := _report_key(member, self._num_read.get(member, 0))]):
            if former := self._report_keys.get(member):
                self._store.delete_key(former)
            self._report_keys[member] = key

    def share_reports(self, generation: int, members: Iterable[int], former: Iterable[int]) -> None:
        """Publish to a generation the reports of its `members`, by rank; only `former` members have one."""
        has_report = set(former)
        reports = [self._report_of(member) if member in has_report else b"" for member in members]
        self._store.set(f"reports/{generation}", reports_as_text(reports))

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
        key = self._report_keys.get(member)
        try:
            return base64.b85decode(self._store.get(key)) if key and self._store.check([key]) else b""
        except ValueError as error:
            raise CommError(f"The report of member {member} is damaged: {error}.") from error


class MemberChannel:
    """One member's side."""

    def __init__(self, store: Store, attempt: str, member: int, seal: Seal) -> None:
        """`store` must not be used by other code; it can be cloned."""
        self.member = member
        self._attempt = attempt
        self._seal = seal
        self._root = store
        self._store = SealedStore(prefix_of(attempt), store, seal)
        self._num_sent = 0
        self._lock = threading.Lock()

    def has_sent(self) -> bool:
        """Whether a process with this number has sent a message before."""
        return self._store.check([f"from/{self.member}/0"])

    def send(self, message: MemberMessage, report: bytes | None = None) -> None:
        """Send `message`, after storing a `report` for the other members. From any thread, but not from a signal
        handler."""
        with self._lock:
            if report is not None:
                self._store.set(_report_key(self.member, self._num_sent), base64.b85encode(report).decode())
            self._store.set(f"from/{self.member}/{self._num_sent}", message.to_json())
            self._num_sent += 1
            self._store.add(_NUM_SENT, 1)

    def reports(self, generation: int) -> tuple[bytes, ...]:
        """The reports of the members of `generation`, by rank."""
        with self._lock:
            try:
                return reports_of_text(self._store.get(f"reports/{generation}"))
            except ValueError as error:
                raise CommError(f"The reports to generation {generation} are damaged: {error}.") from error

    def store_of(self, generation: int) -> Store:
        """The store in which its members meet, over a connection of its own."""
        with self._lock:
            return PrefixStore(generation_prefix(self._attempt, generation), compat.twin(self._root))

    def listen(
        self, first: int, read: Callable[[Announcement], bool], pause: Callable[[], object] = _pause
    ) -> threading.Thread:
        """Start a thread that calls `read` with each announcement from number `first` on, until that returns false.
        `pause` is called before a forged one is read again.

        [Note: threads at exit] A thread that returns from torch's store while Python shuts down ends the process
        (`terminate called`). So this thread must end before; the last announcement to a member serves that purpose.
        """
        prefix, twin = prefix_of(self._attempt), compat.twin(self._root)
        plain, store = PrefixStore(prefix, twin), SealedStore(prefix, twin, self._seal)

        forged = Forged()

        def follow() -> None:
            number, goes_on = first, True
            try:
                while goes_on:
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
                    goes_on = read(announcement)
                    number += 1
            except (CommError, ValueError) as error:  # forged: what follows cannot be trusted either
                read(Announcement("end", -1, text=str(error)))
            except RuntimeError:
                return  # the launcher is gone, and this process will not be there for long

        thread = threading.Thread(target=follow, name=f"shardwise-news-{self.member}", daemon=True)
        thread.start()
        return thread


def _is_genuine(store: SealedStore, key: str) -> bool:
    try:
        store.get(key)
    except NotOfJobError:
        return False
    return True
