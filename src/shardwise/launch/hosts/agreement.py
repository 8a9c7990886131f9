"""The hosts of an elastic job, whose launcher is lost, agree on one of them that starts the next.

[Note: agreement] This is Raft (Ongaro and Ousterhout, USENIX ATC 2014) for a log of which only the last entry counts:
what the launcher has decided. It sends each version to all hosts, and nothing that follows from it happens before half
of them have it. The next launcher needs the voices of more than half. So a host that has the last version has a voice,
and the newest one among the voices starts the launcher, with what it has. A host follows one launcher, or votes for one
host, by the one connection that it has. A launcher that was cut off from more than half of the hosts can decide nothing
any more, and ends; of two equal halves the one with the launcher goes on. Where hosts have come or gone, both those
before and those after the change count (Raft's joint consensus).

The voices are collected by the first host, in the order of the list, that the others reach. What a version contains
stays where it is; voices have its number only.

A host may become silent at any moment. Hosts then wait for what does not come, and no answer can tell them. So the
system asks, by TCP's keepalives, and breaks a connection over which nothing comes for as long as the job takes a silent
host for lost. Whoever loses the one that it follows or has voted for begins again.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

from shardwise.launch.hosts.host_messages import Inbox, Message, packed, report
from shardwise.launch.hosts.sealed_lines import (
    SealedConnection,
    SealedInbox,
    SealedSink,
    SealedSource,
    accept_host,
    connect_to_launcher,
)
from shardwise.system.job_token import ForgedError
from shardwise.system.silent_connections import break_when_silent

_MAX_VOICE_BYTES = 2**20
_SURE_SECONDS, _HANDSHAKE_SECONDS = 1.0, 5.0


@dataclass(frozen=True)
class Waits:
    """How long a host waits for what, in seconds."""

    silence: float
    """For a host from which nothing comes any more, as the job does."""
    connect: float = 5.0
    handshake: float = 5.0
    voice: float = 20.0
    """For others, of which some have not noticed yet that the launcher is lost."""
    start: float = 120.0
    """For a launcher that imports torch."""
    pause: float = 1.0
    """Before all hosts of the list are asked again."""
    look: float = 0.2
    """Between two looks whether this host is to end."""


@dataclass(frozen=True)
class Seat:
    """A host that counts, by a name of its own that no other one has had, and where it listens; port 0: nowhere."""

    label: str
    address: str
    port: int


@dataclass(frozen=True)
class Kept:
    """What a host has of its launcher."""

    label: str
    """This host's."""
    number: int
    """How many launchers the job has had before that one."""
    version: int
    hosts: tuple[Seat, ...]
    before: tuple[str, ...]
    """The hosts that counted before this version."""
    seconds: float
    """How long to look for the next launcher."""
    state: str
    """What the launcher has decided, as only a launcher reads it."""

    @classmethod
    def of(cls, order: Message) -> Kept:
        hosts = tuple(Seat(*one) for one in order["hosts"])
        return cls(**{**order, "hosts": hosts, "before": tuple(order["before"])})

    def voice(self) -> Message:
        """What others are told of it."""
        hosts = [[one.label, one.address, one.port] for one in self.hosts]
        return {"number": self.number, "version": self.version, "hosts": hosts, "before": list(self.before)}


def has_half(labels: Collection[str], *rosters: Collection[str]) -> bool:
    """Whether these are at least half of each of several `rosters`: the launcher's side."""
    return all(2 * len(set(labels) & set(roster)) >= len(set(roster)) for roster in rosters)


def has_majority(labels: Collection[str], *rosters: Collection[str]) -> bool:
    """Whether these are more than half of each that is not empty: the side of those who have lost it."""
    return all(2 * len(set(labels) & set(roster)) > len(set(roster)) for roster in rosters if roster)


def with_the_newest(voices: Mapping[str, Message]) -> list[str]:
    """The hosts that have the newest version of all that have said something; nobody while those are too few."""
    age = max((voice["number"], voice["version"]) for voice in voices.values())
    newest = [label for label, voice in voices.items() if (voice["number"], voice["version"]) == age]
    roster = [label for label, _, _ in voices[newest[0]]["hosts"]]
    return newest if has_majority(voices, roster, voices[newest[0]]["before"]) else []


def chosen(voices: Mapping[str, Message], first: str) -> Seat | None:
    """The host that starts the launcher, by what each host has said; `None` while they are too few. It is one that
    listens and has the newest version, if possible the `first`."""
    able = [
        Seat(*one)
        for label in with_the_newest(voices)
        for one in voices[label]["hosts"]
        if one[0] == label and one[2]  # its port
    ]
    return min(able, key=lambda seat: seat.label != first, default=None)


@dataclass
class Following:
    """A connection to the next launcher, and what has come by it already."""

    sealed: SealedConnection
    inbox: Inbox
    orders: list[Message]


class Presence:
    """Tells hosts that have lost a launcher which others still follow that the job goes on without them."""

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._asked_at: float | None = None

    def look(self, heard: float, now: float) -> None:
        """`heard` is when the launcher was last heard of. If that was before another host has asked, that one may only
        have noticed the loss first, and a moment later it may have been on its way; it is left waiting, for
        `Agreement`."""
        if not select.select([self._listener], [], [], 0)[0]:
            self._asked_at = None
        elif self._asked_at is None:
            self._asked_at = now
        elif heard > self._asked_at + _SURE_SECONDS:
            self._asked_at = None
            threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        with suppress(OSError, ForgedError):
            self._listener.settimeout(_HANDSHAKE_SECONDS)
            with self._listener.accept()[0] as connection:
                sealed = accept_host(connection, self._token, _HANDSHAKE_SECONDS)
                SealedSink(connection, sealed.to_host).write(packed({"do": "bye"}))


def dial(seat: Seat, waits: Waits) -> socket.socket:
    """A connection to another host, which breaks when that is silent. Raises `OSError`."""
    connection = socket.create_connection((seat.address, seat.port), timeout=waits.connect)
    break_when_silent(connection, waits.silence)
    return connection


class Agreement:
    """One host's part in it."""

    def __init__(
        self,
        kept: Kept,
        token: str,
        listener: socket.socket | None,
        start: Callable[[Kept, socket.socket], Callable[[], bool]],
        waits: Waits,
        is_ended: Callable[[], bool] = lambda: False,
        dial: Callable[[Seat, Waits], socket.socket] = dial,
    ) -> None:
        """`start` starts a launcher that accepts connections at the listener, and returns whether that has ended again,
        when asked. `is_ended`: whether this host is to end."""
        self._kept, self._token, self._listener = kept, token, listener
        self._start, self._waits, self._is_ended, self._dial = start, waits, is_ended, dial

    def next_launcher(self) -> Following | None:
        """Agree with the others, and connect to the launcher; `None` if there is none in time. Blocks."""
        deadline = time.monotonic() + self._kept.seconds
        while time.monotonic() < deadline and not self._is_ended():
            for host in self._kept.hosts:
                found: Seat | Following | None = None
                if host.label == self._kept.label:
                    found = self._collect(self._listener) if self._listener is not None else None
                elif host.port:
                    found = self._vote_for(host)
                if isinstance(found, Seat):
                    found = self._follow(found)
                if found is not None:
                    return found
            time.sleep(self._waits.pause)
        return None

    def _collect(self, listener: socket.socket) -> Seat | None:
        """Collect voices. Returns the host that is to start a launcher, as it was told; `None` if they are too few."""
        waits = self._waits
        voices, deadline = {self._kept.label: self._kept.voice()}, time.monotonic() + waits.voice
        with ExitStack() as stack:
            sinks: list[SealedSink] = []
            while (seat := chosen(voices, self._kept.label)) is None:
                if time.monotonic() > deadline or self._is_ended():
                    return None
                listener.settimeout(waits.look)
                try:
                    connection = stack.enter_context(listener.accept()[0])
                    sealed = accept_host(connection, self._token, waits.handshake)
                    connection.settimeout(waits.handshake)
                    source = SealedSource(connection, sealed.to_launcher)
                    stack.callback(source.close)
                    voice = report(source.readline(_MAX_VOICE_BYTES))
                except (OSError, ForgedError):
                    continue
                if voice is not None and voice.pop("kind") == "voice":
                    voices[sealed.name] = voice
                    sinks.append(SealedSink(connection, sealed.to_host))
            for sink in sinks:
                with suppress(OSError):  # it votes for another one by now
                    sink.write(packed({"do": "elected", **asdict(seat)}))
        return seat

    def _vote_for(self, host: Seat) -> Seat | Following | None:
        """Give this host's voice to another one. Returns whom it was told to follow; `None` if nobody. A launcher may
        be there already, which takes this connection for that of a host that follows it."""
        deadline = time.monotonic() + self._waits.voice
        with ExitStack() as stack:
            try:
                connection = self._dial(host, self._waits)
                stack.callback(connection.close)
                if not self._hears(connection, deadline):
                    return None
                sealed = connect_to_launcher(connection, self._kept.label, self._token, self._waits.handshake)
                voice = {"kind": "voice", **self._kept.voice()}
                SealedSink(connection, sealed.to_launcher).write(packed(voice))
            except (OSError, ForgedError):
                return None
            inbox, deadline = SealedInbox(connection, sealed.to_host), time.monotonic() + self._waits.voice
            while not inbox.closed and time.monotonic() < deadline and not self._is_ended():
                orders = inbox.take(self._waits.look)
                if orders and orders[0]["do"] == "elected":
                    return Seat(orders[0]["label"], orders[0]["address"], orders[0]["port"])
                if orders:
                    stack.pop_all()
                    return Following(sealed, inbox, orders)
        return None

    def _follow(self, host: Seat) -> Following | None:
        """Connect to the launcher at a host, which may be this one, that then starts it; `None` if it does not come."""
        has_ended: Callable[[], bool] = lambda: False  # noqa: E731
        if host.label == self._kept.label and self._listener is not None:
            self._listener.settimeout(None)
            has_ended = self._start(self._kept, self._listener)
        deadline = time.monotonic() + self._waits.start
        with ExitStack() as stack:
            try:
                connection = self._dialled(host)
                stack.callback(connection.close)
                if not self._hears(connection, deadline, has_ended):
                    return None
                sealed = connect_to_launcher(connection, self._kept.label, self._token, self._waits.handshake)
            except (OSError, ForgedError):
                return None
            stack.pop_all()
            return Following(sealed, SealedInbox(connection, sealed.to_host), [])

    def _dialled(self, host: Seat) -> socket.socket:
        """A connection to the host that has been elected. It is there, unless it has become silent; but all others
        connect at the same moment."""
        deadline = time.monotonic() + self._waits.silence
        while True:
            try:
                return self._dial(host, self._waits)
            except OSError:
                if time.monotonic() > deadline or self._is_ended():
                    raise
                time.sleep(self._waits.look)

    def _hears(self, connection: socket.socket, deadline: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Whether something comes over a connection, or it breaks, before the deadline."""
        while time.monotonic() < deadline and not self._is_ended() and not is_over():
            if select.select([connection], [], [], self._waits.look)[0]:
                return True
        return False
