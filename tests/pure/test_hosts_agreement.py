"""The launcher of an elastic job on several hosts is lost at any point of its work, and hosts that are more than half
agree on the next one, with what they have of it: simulated processes, as in test_launcher_succession.py."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.errors import LaunchError
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.heir import gather
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.mirror import HostsState, Mirror
from shardwise.launch.elastic.remote_host import RemoteHost
from shardwise.launch.elastic.remote_workers import RemoteMemory, RemoteWorkers
from shardwise.launch.elastic.slots import Slot, Slots
from shardwise.launch.elastic.workers import Ended, Event, HostLost
from shardwise.launch.environment import Attempt
from shardwise.launch.hosts.agreement import (
    Agreement,
    Following,
    Kept,
    Presence,
    Seat,
    Waits,
    chosen,
    dial,
    has_half,
    has_majority,
)
from shardwise.launch.hosts.connection import Arrivals, Connection
from shardwise.launch.hosts.host_messages import outcome_as_message, packed
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.hosts.pod_server import PodCarrier, PodServer
from shardwise.launch.job import Elastic, Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.outcome import Outcome
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.ssh import SshPlan, SshSettings
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import new_token
from shardwise.system.launcher_address import LauncherAddress
from tests.patience import wait_until
from tests.pure.far_end import FarEnd
from tests.pure.test_launcher_succession import NEVER, TOKEN, KilledError, Life, Mortal, Processes, Workers, check
from tests.thorough import THOROUGH, varies

JOB = Job((__file__,), 3, elastic=Elastic(2, 3, retries=1))
PLAN = SshPlan(JOB, (Share(Host("a"), 0, 3),), SshSettings("/"), {"SECRET": "word"})


def subsets(names: tuple[str, ...]) -> Iterator[set[str]]:
    for size in range(len(names) + 1):
        yield from map(set, itertools.combinations(names, size))


def test_whoever_decides_and_whoever_follows_have_a_host_in_common() -> None:
    """Also while hosts come and go: the two sides count both those before and those after."""
    names = ("a", "b", "c", "d", "e")
    rosters = [("a", "b", "c"), ("a", "b"), ("a", "b", "c", "d", "e"), ("c", "d", "e")]
    for before, after in itertools.product(rosters, repeat=2):
        for one, other in itertools.product(list(subsets(names)), repeat=2):
            if has_half(one, before, after) and has_majority(other, before, after):
                assert one & other
    assert has_half({"a"}, ["a", "b"])
    assert not has_majority({"b"}, ["a", "b"])


def voice(version: int, *hosts: str, number: int = 0, before: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"number": number, "version": version, "hosts": [[one, one, 1] for one in hosts], "before": list(before)}


def test_one_that_has_the_newest_version_starts_the_launcher() -> None:
    abc = ("a", "b", "c")
    assert chosen({"a": voice(3, *abc)}, "a") is None
    assert chosen({"a": voice(3, *abc), "b": voice(3, *abc)}, "b") == Seat("b", "b", 1)
    assert chosen({"a": voice(3, *abc), "c": voice(4, *abc)}, "a") == Seat("c", "c", 1)
    assert chosen({"a": voice(9, *abc), "c": voice(0, *abc, number=1)}, "a") == Seat("c", "c", 1)
    late = {"a": voice(4, "a", "b", "d", before=abc), "b": voice(3, *abc)}
    assert chosen(late, "a") == Seat("a", "a", 1)
    assert chosen({"a": late["a"], "d": late["a"]}, "a") is None, "a version whose hosts are new may not be decided"


@dataclass
class SimulatedHost:
    """What one host has, which outlives launchers."""

    name: str
    kept: Kept | None = None


@dataclass
class Hosts:
    """The hosts as a launcher has them, which may be killed before each message to one of them."""

    known: list[SimulatedHost]
    life: Life
    memory: Callable[[], Any]
    cut_off: set[str] = field(default_factory=set)
    parting: list[RemoteHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remote = [RemoteHost(Share(Host(one.name), 0, 1), state="ready") for one in self.known]
        for host, one in zip(self.remote, self.known, strict=True):
            host.connection = _To(one, self.life)  # type: ignore[assignment]  # of which `Mirror` uses `send`
            host.seat = one.name, 1
            host.label = one.kept.label if one.kept is not None else ""

    @property
    def connected(self) -> list[RemoteHost]:
        return [host for host in self.remote if host.name not in self.cut_off]

    def part(self) -> None:
        self.parting.clear()

    def hear(self) -> None:
        for host, one in zip(self.remote, self.known, strict=True):
            if one.kept is not None and host.name not in self.cut_off:
                host.num_kept = one.kept.version


@dataclass
class _To:
    host: SimulatedHost
    life: Life

    def send(self, do: str, **order: Any) -> None:
        self.life.act()
        assert do == "keep"
        self.host.kept = Kept.of(order)


class Launchers:
    """The launchers of one job on three hosts, each with a clock of its own."""

    def __init__(self) -> None:
        self.processes, self.said = Processes(), list[str]()
        self.hosts = [SimulatedHost(name) for name in ("a", "b", "c")]
        self.num = 0

    def state(self, voters: tuple[int, ...]) -> HostsState:
        """What a launcher knows that these hosts have elected."""
        kept = {one.kept.label: one.kept for one in (self.hosts[n] for n in voters) if one.kept is not None}
        if not kept:
            return HostsState(PLAN, "run")
        seat = chosen({label: one.voice() for label, one in kept.items()}, next(iter(kept)))
        if seat is None:  # not half of them have been told of the job, so it has not begun
            return HostsState(PLAN, "run")
        state = HostsState.of_text(kept[seat.label].state)
        assert not state.plan.environment, "secrets stay where they are"
        return replace(state, number=state.number + 1)

    def launch(self, last: int, voters: tuple[int, ...] = (0, 1, 2)) -> bool | None:
        """Whether the job succeeded; `None` if this launcher was killed before, at its `last` act."""
        life, state, self.num = Life(last), self.state(voters), self.num + 1
        started = self.processes.now - 1000 * self.num

        def own_clock() -> float:
            return self.processes.now - started

        ahead = state.time - own_clock() if state.version >= 0 else 0
        workers: Any = Workers(self.processes, life)
        if state.version >= 0:
            workers.adopt(state.workers)
        # those that had heard of no launcher when theirs was lost have ended
        following = [one for one in self.hosts if one.kept is not None or state.version < 0]
        mirror = Mirror(state, Hosts(following, life, workers.memory), 60, lambda: own_clock() + ahead)
        self.processes.store = store = HashStore()
        slots = Slots(3, Budget(1, 600))
        slots.ready("a", 3, mirror.now())
        assert JOB.elastic is not None
        with SignalLog() as signals, Folder(None) as folder:
            context = Context(
                *(JOB, JOB.elastic, store, "h", 1, "run", folder, workers, slots, signals, self.said.append, TOKEN),
                succession=mirror,
                clock=mirror.now,
            )
            try:
                mirror.keep(state.agent)
                agent = ElasticAgent(context, state.agent)
                channel: Any = agent._channel
                channel._store = Mortal(channel._store, life)
                return agent.run()
            except KilledError:
                self.processes.go_on()  # they have read what it had published until then
                return None


def acts_of_one_launcher(monkeypatch: pytest.MonkeyPatch) -> int:
    launchers, life = Launchers(), Life(NEVER)
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.Life", lambda last: life)
        assert launchers.launch(NEVER)
    check_processes(launchers)
    return NEVER - life.left


def check_processes(launchers: Launchers) -> None:
    check(launchers)  # type: ignore[arg-type]  # which looks at processes only


@varies
def test_a_launcher_is_lost_at_any_point_of_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after some hosts have heard of a decision, and others have not."""
    num_acts = acts_of_one_launcher(monkeypatch)
    assert num_acts > 30
    voters = itertools.cycle([(0, 1), (1, 2), (0, 2), (0, 1, 2)])
    for last in range(0, num_acts, 1 if THOROUGH else 3):
        launchers = Launchers()
        assert launchers.launch(last) is None
        who = next(voters)
        assert launchers.launch(NEVER, who), (last, who, launchers.said)
        check_processes(launchers)


def test_and_the_next_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    num_acts = acts_of_one_launcher(monkeypatch)
    for first, second in itertools.product(range(3, num_acts, 11), range(0, 12, 5)):
        launchers = Launchers()
        assert launchers.launch(first) is None
        if launchers.launch(second, (1, 2)) is None:
            assert launchers.launch(NEVER, (0, 2)), (first, second, launchers.said)
        check_processes(launchers)


def test_a_launcher_that_reaches_less_than_half_of_the_hosts_decides_nothing_any_more() -> None:
    known = [SimulatedHost(name) for name in "abcd"]
    hosts = Hosts(known, Life(NEVER), lambda: None)
    mirror = Mirror(HostsState(PLAN, "run"), hosts, 60)
    mirror.keep(None)
    hosts.cut_off = {"c", "d"}
    mirror.keep(None)  # the half with the launcher goes on
    hosts.cut_off |= {"b"}
    mirror.keep(None)  # of two that were left
    other = Hosts(known, Life(NEVER), lambda: None)
    mirror = Mirror(HostsState(PLAN, "run"), other, 60)
    mirror.keep(None)
    other.cut_off = {"b", "c", "d"}
    with pytest.raises(LaunchError, match="This launcher reaches 1 of 4 hosts"):
        mirror.keep(None)


def test_hosts_that_leave_together_are_asked_once_more_and_then_do_not_count() -> None:
    known = [SimulatedHost(name) for name in "abc"]
    hosts = Hosts(known, Life(NEVER), lambda: None)
    mirror = Mirror(HostsState(PLAN, "run"), hosts, 60)
    mirror.keep(None)
    hosts.parting = [host for host in hosts.remote if host.name in "bc"]
    hosts.cut_off = {"b", "c"}  # no `connected` ones

    def hear() -> None:
        for host, one in zip(hosts.remote, known, strict=True):
            assert one.kept is not None
            host.num_kept = one.kept.version

    hosts.hear = hear  # type: ignore[method-assign]
    mirror.keep(None)
    assert mirror.state.roster == ("host-0",)
    assert [one.kept.hosts for one in known if one.kept is not None] == [(Seat("host-0", "a", 1),)] * 3
    assert not hosts.parting


# -- over sockets -----------------------------------------------------------------------------------------------


@contextmanager
def listeners(num: int) -> Iterator[list[socket.socket]]:
    opened = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def kept_by(number: int, seats: tuple[Seat, ...], version: int) -> Kept:
    return Kept(f"host-{number}", 0, version, seats, (), 1000, "")


def seats_of(opened: list[socket.socket]) -> tuple[Seat, ...]:
    return tuple(Seat(f"host-{n}", "127.0.0.1", one.getsockname()[1]) for n, one in enumerate(opened))


def agree(
    numbers: tuple[int, ...],
    versions: dict[int, int],
    opened: list[socket.socket],
    seats: tuple[Seat, ...],
    is_ended: Callable[[], bool],
) -> tuple[dict[int, Following | None], list[str]]:
    """What each of these hosts has found, and the labels of those that have started a launcher."""
    token, started = new_token(), list[str]()
    found: dict[int, Following | None] = {}
    servers: list[PodServer] = []
    carriers: list[PodCarrier] = []

    def start(kept: Kept, listener: socket.socket) -> Callable[[], bool]:
        started.append(kept.label)
        servers.append(PodServer(listener, token, lambda _: None))
        return lambda: False

    def take_part(number: int) -> None:
        kept = kept_by(number, seats, versions[number])
        found[number] = Agreement(kept, token, opened[number], start, Waits(4), is_ended).next_launcher()

    threads = [threading.Thread(target=take_part, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    # the launcher's first word to hosts that have voted late, and so are connected to it already
    while any(thread.is_alive() for thread in threads):
        for name in servers[0].names() if servers else []:
            carriers.append(carrier := servers[0].take(name))
            carrier.stdin.write(b'\x1e{"do": "adopt", "members": []}\n')
        threads[0].join(0.05)
        for thread in threads:
            thread.join(0.05)
    for server in servers:
        server.close()
    for carrier in carriers:
        carrier.close()
    for following in found.values():
        if following is not None:
            following.sealed.connection.close()
    return found, started


def test_hosts_agree_on_one_of_those_with_the_newest_version_though_the_first_is_lost() -> None:
    with listeners(4) as opened:
        seats = seats_of(opened)
        opened[0].close()
        found, started = agree((1, 2, 3), {1: 6, 2: 7, 3: 6}, opened, seats, lambda: False)
    assert started == ["host-2"]
    assert all(isinstance(one, Following) for one in found.values())


def test_half_of_the_hosts_agree_on_nobody() -> None:
    num_looks = itertools.count()
    with listeners(2) as opened:
        seats = seats_of(opened)
        opened[0].close()
        found, started = agree((1,), {1: 3}, opened, seats, lambda: next(num_looks) > 3)
    assert (found, started) == ({1: None}, [])


def test_a_host_that_alone_has_lost_the_launcher_is_told_to_end() -> None:
    token = new_token()
    with listeners(2) as opened:
        seats = seats_of(opened)
        presence, now = Presence(opened[0], token), 0.0
        agreement = Agreement(kept_by(1, seats, 3), token, opened[1], lambda *_: lambda: False, Waits(4))
        found: list[Following | None] = []
        thread = threading.Thread(target=lambda: found.append(agreement.next_launcher()))
        thread.start()
        while thread.is_alive():
            now += 1
            presence.look(heard=now - 0.5, now=now)  # the launcher is heard of again and again
            thread.join(0.01)
    assert found[0] is not None
    found[0].sealed.connection.close()
    assert found[0].orders == [{"do": "bye"}]


def test_one_that_may_have_noticed_first_is_left_waiting() -> None:
    with listeners(1) as (listener,):
        presence = Presence(listener, new_token())
        with socket.create_connection(listener.getsockname()) as asking:
            for now in range(100):
                presence.look(heard=0.5, now=float(now))
            asking.settimeout(0)
            with pytest.raises(BlockingIOError):
                asking.recv(1)


class Network:
    """Between hosts. One of them becomes silent once it has sent or been sent so many blocks. As with keepalives, its
    connections break then, and no others are made."""

    def __init__(self, silent: str, last: int) -> None:
        self.silent, self.num_passed, self.is_silent = silent, 0, False
        self._last, self._lock = last, threading.Lock()
        self._ends: list[socket.socket] = []

    def dial_from(self, label: str) -> Callable[[Seat, Waits], socket.socket]:
        def dial_by_network(seat: Seat, waits: Waits) -> socket.socket:
            if label == seat.label or self.silent not in (label, seat.label):
                return dial(seat, waits)
            if self.is_silent:
                raise TimeoutError("nobody answers")
            with socket.create_server(("127.0.0.1", 0)) as between:
                near, far = socket.create_connection(between.getsockname()), dial(seat, waits)
                middle = between.accept()[0]
            self._ends += [middle, far]
            for source, sink in ((middle, far), (far, middle)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()
            return near

        return dial_by_network

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while (block := source.recv(2**16)) and self._passes():
                sink.sendall(block)
        for end in self._ends if self.is_silent else (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _passes(self) -> bool:
        with self._lock:
            self.is_silent = self.is_silent or self.num_passed == self._last
            self.num_passed += not self.is_silent
            return not self.is_silent

    def close(self) -> None:
        for end in self._ends:
            end.close()


class LoneHosts:
    """Hosts that have lost their launcher, and whom each of them follows."""

    def __init__(self, opened: list[socket.socket], network: Network) -> None:
        self.followed: dict[str, str] = {}
        self._opened, self._network, self._seats = opened, network, seats_of(opened)
        self._token, self._is_over = new_token(), threading.Event()
        self._servers: list[PodServer] = []
        self._waits = Waits(silence=0.1, handshake=1, voice=0.5, pause=0.01, look=0.01)
        self._threads = [threading.Thread(target=self._live, args=(number,)) for number in range(len(opened))]
        for thread in self._threads:
            thread.start()

    def _live(self, number: int) -> None:
        kept = kept_by(number, self._seats, version=6 + number % 2)
        agreement = Agreement(
            *(kept, self._token, self._opened[number], self._start),
            waits=self._waits,
            is_ended=self._is_over.is_set,
            dial=self._network.dial_from(kept.label),
        )
        while (following := agreement.next_launcher()) is not None:
            orders = list(following.orders)
            while not following.inbox.closed and not self._is_over.is_set():
                for order in orders:
                    self.followed[kept.label] = order["host"]
                orders = following.inbox.take(0.01)
            self.followed.pop(kept.label, None)
            following.sealed.connection.close()

    def _start(self, kept: Kept, listener: socket.socket) -> Callable[[], bool]:
        server = PodServer(listener, self._token, lambda _: None)
        self._servers.append(server)
        threading.Thread(target=self._lead, args=(kept.label, server), daemon=True).start()
        return lambda: False

    def _lead(self, label: str, server: PodServer) -> None:
        """A launcher, which says by its first order where it is."""
        carriers = []
        while not self._is_over.wait(0.01):
            for name in server.names():
                carriers.append(carrier := server.take(name))
                with suppress(OSError):  # it has become silent
                    carrier.stdin.write(packed({"do": "launcher", "number": 1, "host": label, "port": 1}))
        for carrier in carriers:
            carrier.close()

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        for server in self._servers:
            server.close()
        self._network.close()


def agree_without(silent: int, last: int) -> None:
    """The other two agree, though this one becomes silent after so many blocks. Each host sends or is sent three at
    least, and more of them if it is one of the first."""
    with listeners(3) as opened:
        network = Network(f"host-{silent}", last)
        hosts, others = LoneHosts(opened, network), {f"host-{n}" for n in range(3) if n != silent}

        def agree() -> bool:
            launchers = set(map(dict(hosts.followed).get, others))
            return len(launchers) == 1 and launchers <= others and (network.is_silent or last >= 3)

        try:
            wait_until(agree, lambda: (silent, last, hosts.followed))
        finally:
            hosts.close()


@varies
def test_one_more_host_becomes_silent_at_any_point_and_the_others_agree() -> None:
    """While it votes, collects, is elected, has started a launcher, or is followed."""
    for silent, last in itertools.product(range(3), range(12)):
        if THOROUGH or (silent + last) % 4 == 0:
            agree_without(silent, last)


def test_a_launcher_that_ends_as_it_starts_is_not_waited_for() -> None:
    """The host that has started it asks the others again."""
    starts = itertools.count()
    with listeners(2) as opened:
        seats = (seats_of(opened)[0],)
        num_looks = itertools.count()
        agreement = Agreement(
            *(kept_by(0, seats, 3), new_token(), opened[0], lambda *_: lambda: next(starts) >= 0),
            waits=Waits(silence=1, pause=0.0, look=0.0),
            is_ended=lambda: next(num_looks) > 50,
        )
        assert agreement.next_launcher() is None
    assert next(starts) > 2


class Pods:
    """A server to which hosts connect at these times of a clock that only waiting moves."""

    def __init__(self, times: dict[str, float]) -> None:
        self.now, self._times = 0.0, times

    def names(self) -> list[str]:
        return [name for name, at in self._times.items() if at <= self.now]

    def take(self, name: str) -> str:
        return name

    def pause(self, seconds: float) -> None:
        self.now += seconds


def test_a_launcher_that_takes_over_waits_for_hosts_but_not_until_others_take_it_for_silent() -> None:
    def gathered(host_timeout: float, **times: float) -> tuple[set[str], float]:
        pods: Any = Pods(times)
        return set(gather(pods, {"a", "b"}, host_timeout, lambda: pods.now, pods.pause)), pods.now

    assert gathered(15, a=0, b=0) == ({"a", "b"}, 0)
    assert gathered(15, a=0, b=2) == ({"a", "b"}, pytest.approx(2, abs=0.1))
    assert gathered(15, a=0, b=9) == ({"a"}, pytest.approx(15 / 4, abs=0.1))
    assert gathered(4, a=0, b=2) == ({"a"}, pytest.approx(1, abs=0.1))
    assert gathered(600, a=0, b=9) == ({"a"}, pytest.approx(5, abs=0.1))
    assert gathered(15, a=0, c=0, b=1) == ({"a", "b"}, pytest.approx(1, abs=0.1)), "strangers do not count"


def test_a_launcher_that_takes_over_hears_what_has_ended_meanwhile_and_what_never_began() -> None:
    shares = {"host-0": Share(Host("a"), 0, 3), "host-1": Share(Host("b"), 3, 1)}
    seats = {"host-0": ("h", 7), "host-1": ("i", 8)}
    memory = RemoteMemory(shares, seats, {0: "a", 1: "a", 2: "a", 3: "b", 4: "gone"}, {}, 0, 5)
    carrier, found = FarEnd(), list[Event]()
    with Folder(None) as folder:
        arrivals: Arrivals = queue.Queue(256)
        workers = RemoteWorkers(PLAN, [], arrivals, ("h", 1), Logs(folder, keeps=False), lambda _: None)
        host = RemoteHost(shares["host-0"], label="host-0", seat=seats["host-0"], is_sealed=True)
        host.connection = Connection(host.share, ["host"], arrivals, host.numbers, carrier)
        workers.adopt(memory, {"host-0": host})
        assert carrier.sent == [{"do": "adopt", "members": [0, 1, 2]}]
        ended = outcome_as_message(Outcome(1, 7, None, 100.0))
        carrier.say(kind="adopted", members=[0, 1], time=time.time() + 50)
        carrier.say(kind="member", outcome=ended, ran_out=False, skips=False)
        while len(found) < 4:
            workers.wait(100)
            found += workers.events()
        assert list(workers.living) == [0]
        assert workers.memory().seats == {"host-0": ("h", 7)}, "the launcher after this one needs them too"
        workers.introduce(LauncherAddress(1, "h", 1), "token")
        workers.start(5, Slot("a", 1), Attempt("h", 1, 0, 0, "run", "token"), {})
        workers.disconnect()
    assert found[0] == HostLost("b", (3,), "it was lost with the launcher")
    assert [(one.number, one.outcome.lost_with) for one in found[1:] if isinstance(one, Ended)] == [
        (4, "its host was lost"),
        (2, "the launcher was lost before it started"),
        (1, ""),
    ]
    last = found[-1]
    assert isinstance(last, Ended)
    assert last.outcome.time == pytest.approx(50, abs=5), "the host's clock is 50 s ahead"
    told = carrier.orders("launcher", "trust", "member")
    assert [one["do"] for one in told] == ["launcher", "member"]
    assert told[1]["attempt"]["token"] == ""
    assert told[1]["environment"] == {}, "others could read what is secret"


def test_what_hosts_keep_makes_only_objects_of_this_package() -> None:
    with pytest.raises(LaunchError, match="cannot be read"):
        HostsState.of_text("no")
    state = HostsState.of_text(HostsState(PLAN, "run").as_text())
    assert (state.plan.job, state.plan.environment) == (JOB, {})
    assert Path(__file__).name in str(state.plan.job.command)
