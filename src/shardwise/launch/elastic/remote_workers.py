"""The processes of an elastic job on other hosts, each with a connection that is renewed when lost.

A host that sends nothing for too long is lost with all its processes; its agent kills them when it receives nothing
either. The launcher tries to reconnect, after growing pauses; a host that answers has slots again.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from shardwise.launch.elastic.code_copy import CodeCopy
from shardwise.launch.elastic.host_list import HostList
from shardwise.launch.elastic.job_notes import Notes
from shardwise.launch.elastic.remote_host import FIRST_PAUSE_SECONDS, HostChecks, RemoteHost
from shardwise.launch.elastic.slots import Slot
from shardwise.launch.elastic.workers import Ended, Event, HostLeaves, HostLost, HostReady
from shardwise.launch.environment import Attempt
from shardwise.launch.hosts.connection import Arrivals, Connection
from shardwise.launch.hosts.gather import next_arrival
from shardwise.launch.hosts.host_messages import BEATS, Message, outcome_from
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.hosts.run import close_all, devices_of
from shardwise.launch.outcome import Outcome
from shardwise.launch.places.hosts import Host, Share, shares
from shardwise.launch.places.ssh import SshPlan
from shardwise.system.launcher_address import LauncherAddress

_LONGEST_PAUSE_SECONDS = 30.0
_ASK_SECONDS = 0.1
_HEAR_MILLISECONDS = 10
_KILL_SECONDS, _CLOSE_SECONDS, _TELL_SECONDS = 5.0, 2.0, 5.0


@dataclass
class RemoteMemory:
    """What a launcher that takes over needs to know about hosts and processes."""

    shares: Mapping[str, Share] = field(default_factory=dict)
    """By label."""
    seats: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By label, as `RemoteHost.seat`."""
    living: Mapping[int, str] = field(default_factory=dict)
    """By number: the names of hosts."""
    outcomes: Mapping[int, Outcome] = field(default_factory=dict)
    attempt: int = 0
    num_started: int = 0
    says_skip: bool = False


class RemoteWorkers:
    """`Workers` on the hosts of a plan, all of which have been checked and answer."""

    def __init__(
        self,
        plan: SshPlan,
        hosts: Sequence[RemoteHost],
        arrivals: Arrivals,
        store: tuple[str, int],
        logs: Logs,
        say: Callable[[str], None],
        host_list: HostList | None = None,
    ) -> None:
        assert plan.job.elastic is not None
        self.notes: Notes = _RemoteNotes(self)
        self.code: CodeCopy | None = None
        """With `--rsync`, what was sent at the start."""
        self.says_skip = False
        """Whether a rank has reported that its plan skips bad batches."""
        self.released: Callable[[str], object] = lambda _: None
        """Is called with the name of a host that has left."""
        self._plan, self._logs, self._say = plan, logs, say
        self._silence_seconds = plan.job.elastic.host_timeout_seconds
        self._hosts = {host.name: host for host in hosts}
        self._checks = HostChecks(store, self._silence_seconds, hosts[0].facts if hosts else {})
        self._host_list = host_list
        self._arrivals = arrivals
        self._pending: list[tuple[Connection, Message]] = []
        self._events: list[Event] = []
        self._living: dict[int, RemoteHost] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._stopped: dict[int, tuple[float, bool]] = {}
        self._attempt = self._num_started = 0
        self._alive_at = 0.0
        self._num_confirmed = 0
        self.parting: list[RemoteHost] = []
        """Hosts that have left, and still count: see `mirror.py`."""
        self._address: LauncherAddress | None = None
        self._token = ""

    # -- Workers ----------------------------------------------------------------------------------------

    @property
    def living(self) -> Collection[int]:
        return self._living.keys()

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        host = self._hosts.get(slot.host)
        if host is None or host.connection is None:  # it was lost, and the event is not handled yet
            outcome = self._outcomes[number] = _lost(number, "before it started")
            self._events.append(Ended(number, outcome))
            return
        if attempt.number != self._attempt or not self._num_started:
            self._attempt, self._num_started = attempt.number, 0
        self._living[number] = host
        host.numbers.add(number)
        if host.is_sealed:  # it has the job's own, and others could read it here
            attempt, own = replace(attempt, token=""), {}
        else:
            own = dict(self._plan.environment)
        environment = {**own, **devices_of(host.share), **settings}
        size = self._plan.job.nproc
        host.connection.send(
            "member",
            number=number,
            rank=min(self._num_started, size - 1),  # provisional: it gets its rank when it joins
            size=size,
            local=slot.local,
            attempt=asdict(attempt),
            environment=environment,
        )
        self._num_started += 1

    def wait(self, milliseconds: int) -> None:
        if not self._events and (arrival := next_arrival(self._arrivals, milliseconds / 1000)) is not None:
            self._pending.append(arrival)

    def events(self) -> list[Event]:
        self._take_all()
        now = time.monotonic()
        self._send_heartbeats(now)
        for host in list(self._hosts.values()):
            self._check(host, now)
        if self._host_list is not None and (hosts := self._host_list.change()) is not None:
            self._follow(hosts)
        found, self._events = self._events, []
        return found

    def outcome(self, number: int) -> Outcome:
        if number in self._outcomes:
            return self._outcomes[number]
        return _lost(number, "its host did not report how it ended")

    def is_stopped(self, number: int, pid: int) -> bool:
        """As its host has last reported; it is asked periodically."""
        host = self._living.get(number)
        asked_at, is_so = self._stopped.get(number, (0.0, False))
        now = time.monotonic()
        if host is not None and host.connection is not None and now > asked_at + _ASK_SECONDS:
            self._stopped[number] = now, is_so
            host.connection.send("is_stopped", number=number, pid=pid)
        return is_so

    def end_one(self, number: int) -> None:
        host = self._living.get(number)
        if host is not None and host.connection is not None:
            host.connection.send("end_member", number=number)

    def end_job(self) -> None:
        self._send_all("end_job")

    def send(self, number: signal.Signals) -> None:
        self._send_all("end", number=int(number))

    def wait_for_end(self, seconds: float, hurry: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while self._living and time.monotonic() < deadline and not hurry():
            self.wait(50)
            self._take_all()
            self._send_heartbeats(time.monotonic())
            for host in list(self._hosts.values()):
                if host.state != "lost":
                    self._listen_for(host, time.monotonic())

    def kill(self) -> int:
        number = len(self._living)
        if number:
            self._send_all("kill")
            self.wait_for_end(_KILL_SECONDS, lambda: False)
        for left in list(self._living):
            del self._living[left]
            self._outcomes[left] = _lost(left, "its host did not report its end")
        return number

    def leave(self, host: str) -> None:
        remote = self._hosts.get(host)
        if remote is None:
            return
        if remote.connection is not None:
            self.parting.append(replace(remote, numbers=set()))
            remote.connection = None
            if self._address is None:
                self.part()
        self.released(host)
        if remote.is_listed:  # it was asked to end, and may come back
            remote.state, remote.pause_seconds = "lost", _LONGEST_PAUSE_SECONDS
            remote.try_at = time.monotonic() + _LONGEST_PAUSE_SECONDS
        else:
            del self._hosts[host]

    def lost_hosts(self) -> list[str]:
        """Hosts of the list that were tried and do not answer. From any thread."""
        hosts = list(self._hosts.items())
        return [name for name, one in hosts if one.state == "lost" and one.pause_seconds > FIRST_PAUSE_SECONDS]

    def begin(self) -> None:
        self._send_all("begin")

    def close(self) -> None:
        if self._living:
            self.kill()
        self._take_all()
        self._logs.close()

    def disconnect(self) -> None:
        """Close all connections: the job is over."""
        self.part()
        close_all([host.connection for host in self._hosts.values() if host.connection is not None])
        self._hosts.clear()

    # -- notes for ranks ---------------------------------------------------------------------------------

    def tell_and_wait(self, do: str, **details: object) -> None:
        """Send an order to all connected hosts, and wait until they have confirmed with `left_out`, or time is up."""
        self._num_confirmed = 0
        wanted = self._send_all(do, **details)
        deadline = time.monotonic() + _TELL_SECONDS
        while self._num_confirmed < wanted and time.monotonic() < deadline:
            self.wait(10)
            self._take_all()

    def tell_rank_0(self, do: str, **details: object) -> None:
        """Send an order to the host of rank 0, which is the process with the lowest number."""
        host = self._living[min(self._living)] if self._living else next(iter(self._hosts.values()), None)
        if host is not None and host.connection is not None:
            host.connection.send(do, **details)

    # -- launchers that follow each other ----------------------------------------------------------------

    @property
    def connected(self) -> list[RemoteHost]:
        """The hosts that have been checked and answer."""
        return [host for host in self._hosts.values() if host.state in ("ready", "leaving") and host.connection]

    def hear(self) -> None:
        """Wait for a message of a host, and note what has come; a host that is silent for too long is given up."""
        self.wait(_HEAR_MILLISECONDS)
        self._take_all()
        now = time.monotonic()
        self._send_heartbeats(now)
        for host in self.connected:
            self._listen_for(host, now)

    def part(self) -> None:
        """Dismiss the hosts that have left, which nobody counts any more."""
        for host in self.parting:
            assert host.connection is not None
            host.connection.send("bye")
            _close_soon(host.connection)
        self.parting.clear()

    def introduce(self, address: LauncherAddress, token: str) -> None:
        """Tell hosts, also those that come later, where this launcher's store is, and what it trusts them with."""
        self._address, self._token = address, token
        for host in self.connected:
            self._introduce(host)

    def _introduce(self, host: RemoteHost) -> None:
        assert host.connection is not None
        if self._address is not None:
            host.connection.send("launcher", **asdict(self._address))
            if not host.is_sealed:
                host.connection.send("trust", token=self._token, environment=dict(self._plan.environment))

    def memory(self) -> RemoteMemory:
        """What a launcher that takes over gets by `adopt`."""
        known = {host.label: host for host in self.connected if host.label}
        return RemoteMemory(
            {label: host.share for label, host in known.items()},
            {label: host.seat for label, host in known.items()},
            {number: host.name for number, host in self._living.items()},
            dict(self._outcomes),
            self._attempt,
            self._num_started,
            self.says_skip,
        )

    def adopt(self, memory: RemoteMemory, hosts: Mapping[str, RemoteHost]) -> None:
        """Go on with the processes of a launcher that is lost; `hosts` are those that have come, by label. Others are
        lost."""
        self._outcomes = dict(memory.outcomes)
        self._attempt, self._num_started, self.says_skip = memory.attempt, memory.num_started, memory.says_skip
        for label, share in memory.shares.items():
            host = self._hosts[share.host.name] = hosts.get(label) or RemoteHost(share, label=label)
            numbers = sorted(number for number, name in memory.living.items() if name == host.name)
            self._living |= dict.fromkeys(numbers, host)
            if host.connection is not None:
                host.numbers.update(numbers)
                host.state = "ready"
                host.connection.send("adopt", members=numbers)
            else:
                self._lose(host, "it was lost with the launcher")
        here = {share.host.name for share in memory.shares.values()}
        for number in [number for number, name in memory.living.items() if name not in here]:
            self._outcomes[number] = _lost(number, "its host was lost")
            self._events.append(Ended(number, self._outcomes[number]))

    def _adopted(self, host: RemoteHost, message: Message) -> None:
        """A host has told which of the processes it has, living or ended."""
        host.ahead_seconds = float(message["time"]) - time.time()
        for number in [number for number, where in self._living.items() if where is host]:
            if number not in message["members"]:
                self._end(_lost(number, "the launcher was lost before it started"))

    def _end(self, outcome: Outcome, *, ran_out: bool = False) -> None:
        if self._living.pop(outcome.rank, None) is not None:
            self._outcomes[outcome.rank] = outcome
            self._events.append(Ended(outcome.rank, outcome, ran_out))

    # -- messages from hosts -----------------------------------------------------------------------------

    def _take_all(self) -> None:
        arrivals, self._pending = self._pending, []
        while (arrival := _arrived(self._arrivals)) is not None:
            arrivals.append(arrival)
        for connection, message in arrivals:
            host = self._hosts.get(connection.name)
            if host is not None and host.connection is connection:
                self._take(host, message)
            for left in self.parting:
                if left.connection is connection and message["kind"] == "kept":
                    left.num_kept = message["version"]

    def _take(self, host: RemoteHost, message: Message) -> None:
        match message["kind"]:
            case "output":
                self._logs.write(self._attempt, message)
            case "member":
                outcome = outcome_from(message["outcome"], host.ahead_seconds)
                self.says_skip = self.says_skip or bool(message["skips"])
                self._end(outcome, ran_out=bool(message["ran_out"]))
            case "kept":
                host.num_kept = message["version"]
            case "adopted":
                self._adopted(host, message)
            case "stopped":
                self._stopped[message["number"]] = time.monotonic(), message["is_so"]
            case "left_out":
                self._num_confirmed += 1
            case "signal":
                if host.state == "ready":
                    host.state = "leaving"
                    self._events.append(HostLeaves(host.name, "received SIGTERM", is_urgent=True))
            case "problem":
                self._lose(host, str(message["text"]))
            case "lost":
                self._lose(host, host.why_closed(self._plan.job.python))
            case "facts" | "members" | "reached" if host.state == "asked":
                self._check_answer(host, message)

    def _check_answer(self, host: RemoteHost, message: Message) -> None:
        """Handle an answer of a host that is being checked."""
        problem = self._checks.take(host, message)
        if problem:
            host.is_copied = False  # what is missing there may be what was copied, if the host begins anew
            self._lose(host, problem)
        elif host.state == "ready":
            self._introduce(host)
            self._events.append(HostReady(host.name, host.share.num_ranks))

    # -- hosts that come and go -------------------------------------------------------------------------

    def _check(self, host: RemoteHost, now: float) -> None:
        if host.state != "lost":
            self._listen_for(host, now)
        elif now > host.try_at:
            if self.code is not None and not host.is_copied:
                self.code.compare(host.name)
            try:
                host.connect(self._plan, self._arrivals, now)
            except OSError as error:  # a host on which a launcher has taken over may have no ssh
                host.state = "asked"
                self._lose(host, str(error))

    def _listen_for(self, host: RemoteHost, now: float) -> None:
        if why := host.why_given_up(now, self._silence_seconds, self._plan.job.python):
            self._lose(host, why)

    def _lose(self, host: RemoteHost, why: str) -> None:
        """Give up a host; a reconnect is tried after a pause."""
        was_asked, why = host.state == "asked", why.rstrip(".?")
        if host.connection is not None:
            host.connection.cut()
            _close_soon(host.connection)
            host.connection = None
        if was_asked:
            if why != host.complaint:
                self._say(f"host {host.name} cannot be used: {why}. It is asked again.")
            host.complaint = why
        else:
            self._lose_processes(host, why)
        host.state, host.try_at = "lost", time.monotonic() + host.pause_seconds
        host.pause_seconds = min(_LONGEST_PAUSE_SECONDS, 2 * host.pause_seconds)
        if not host.is_listed:
            del self._hosts[host.name]

    def _lose_processes(self, host: RemoteHost, why: str) -> None:
        numbers = tuple(number for number, where in self._living.items() if where is host)
        for number in numbers:
            del self._living[number]
            self._outcomes[number] = _lost(number, why)
        self._events.append(HostLost(host.name, numbers, why))

    def _follow(self, hosts: list[Host]) -> None:
        """Follow a change of the host list."""
        listed = {share.host.name: share for share in shares(hosts, self._plan.slots_per_host)}
        for name in [name for name in self._hosts if name not in listed]:
            host = self._hosts[name]
            host.is_listed = False
            if host.state == "ready":
                host.state = "leaving"
                self._events.append(HostLeaves(name, "is no longer in the list of hosts"))
            elif host.state != "leaving":
                if host.connection is not None:
                    self._lose(host, "it is no longer in the list of hosts")
                self._hosts.pop(name, None)
        for name, share in listed.items():
            known = self._hosts.setdefault(name, RemoteHost(share))
            known.is_listed = True
            before, known.share = known.share.num_ranks, share
            if known.state != "ready" or before == share.num_ranks:
                continue
            if share.num_ranks > before:
                self._events.append(HostReady(name, share.num_ranks))
            else:
                why = f"has {share.num_ranks} slots now, instead of {before}"
                self._events.append(HostLeaves(name, why, share.num_ranks))

    def _send_heartbeats(self, now: float) -> None:
        if now > self._alive_at:
            self._alive_at = now + self._silence_seconds / BEATS
            for host in self._hosts.values():
                if host.connection is not None:
                    host.connection.send("alive")

    def _send_all(self, do: str, **details: object) -> int:
        """Send an order to all connected hosts; return their number."""
        there = self.connected
        for host in there:
            assert host.connection is not None
            host.connection.send(do, **details)
        return len(there)


class _RemoteNotes:
    """Notes in the folder of each host."""

    def __init__(self, workers: RemoteWorkers) -> None:
        self._workers = workers

    def skips(self) -> bool:
        return self._workers.says_skip

    def leave_out(self, steps: Sequence[int]) -> None:
        self._workers.tell_and_wait("leave_out", steps=list(steps))

    def record(self, line: dict[str, object]) -> None:
        self._workers.tell_rank_0("record", line=line)


def _lost(number: int, why: str) -> Outcome:
    """That of a process of which nobody has told how it ended."""
    return Outcome(number, 1, None, time.time(), lost_with=why)


def _arrived(arrivals: Arrivals) -> tuple[Connection, Message] | None:
    try:
        return arrivals.get_nowait()
    except queue.Empty:
        return None


def _close_soon(connection: Connection) -> None:
    """Close a connection without waiting for it."""
    threading.Thread(target=connection.close, args=(_CLOSE_SECONDS,), daemon=True).start()
