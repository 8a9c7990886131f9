"""A launcher is killed at any point of its work, and the next one goes on from what is written down: simulated
processes, a store that is gone with its launcher, and a clock that tests turn."""

from __future__ import annotations

import itertools
import pickle
import signal
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.comm.members import Announcement, MemberMessage
from shardwise.comm.members.channels import MemberChannel, prefix_of
from shardwise.comm.watch.sealed_store import SealedStore
from shardwise.errors import LaunchError
from shardwise.launch.adopted import RankRecord
from shardwise.launch.autoscale import Schedule, Sizes
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.scaling import Scaling
from shardwise.launch.elastic.slots import Slot, Slots
from shardwise.launch.elastic.succession import JobState, Succession
from shardwise.launch.elastic.supervise_elastic import take_over
from shardwise.launch.elastic.workers import Event, HostReady, WorkersMemory
from shardwise.launch.environment import Attempt
from shardwise.launch.job import Elastic, Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.orphans import Orphanhood
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import Seal, new_token
from tests.admissions import AtOnce
from tests.pure.simulated_workers import SimulatedWorkers
from tests.thorough import THOROUGH, varies

TOKEN = new_token()
NEVER = 10**9


class KilledError(Exception):
    """The launcher was killed."""


class Life:
    """Of a launcher that is killed at its `last` act that others can see."""

    def __init__(self, last: int) -> None:
        self.left = last

    def act(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise KilledError


class Processes:
    """The processes of a job, which outlive its launchers."""

    def __init__(self) -> None:
        self.now = 0.0
        """In seconds, one for each time that its launcher waits."""
        self.store = HashStore()
        self.members: dict[int, Member] = {}
        self.codes: dict[int, int] = {}
        self.heard: dict[int, set[str]] = {}
        """By number of an announcement: what members have read there."""

    def living(self) -> list[Member]:
        return [member for number, member in self.members.items() if number not in self.codes]

    def go_on(self) -> None:
        self.now += 1
        for member in self.living():
            member.go_on()
        self.befall()

    def befall(self) -> None:
        """Member 1 of the first generation is killed. When another has taken its place, all finish."""
        here = {member.number: member.formed for member in self.living()}
        if len(here) < 3 or len(set(here.values())) > 1 or -1 in here.values():
            return
        if 1 in here:
            self.codes[1] = -signal.SIGKILL
        elif max(here) in self.members[0].members:
            for member in self.living():
                member.send("done")
                self.codes[member.number] = 0


class Member:
    """A process that answers its launcher, and joins whatever generation that announces."""

    def __init__(self, number: int, processes: Processes, first: int) -> None:
        self.number, self.processes, self.num_read = number, processes, first
        self.generation = self.formed = -1
        self.members: tuple[int, ...] = ()
        self.reports: list[tuple[bytes, ...]] = []
        self._store = processes.store
        self._channel = MemberChannel(self._store, "0", number, Seal(TOKEN, "0"), lambda: processes.store)
        self.send("here")

    def send(self, kind: Any, report: bytes | None = None, **more: Any) -> None:
        self._channel.send(MemberMessage(kind, self.number, self.generation, **more), report)

    def go_on(self) -> None:
        if self._store is not self.processes.store:
            self._store = self.processes.store
            self._channel._follow_the_next()
        news = SealedStore(prefix_of("0"), self._store, Seal(TOKEN, "0"))
        while news.check([key := f"news/{self.num_read}"]):
            text = news.get(key)
            self.processes.heard.setdefault(self.num_read, set()).add(text.decode())
            self.num_read += 1
            self._read(Announcement.from_json(text))

    def _read(self, one: Announcement) -> None:
        if one.kind == "entering" and self.number in one.members:
            self.generation, self.members = one.generation, one.members
            self.send("opened")
        elif one.kind in ("over", "wanted") and one.generation == self.generation:
            self.send("ready", f"{self.number} of {self.generation}".encode(), text="lost" * (one.kind == "over"))
        elif one.kind == "formed" and one.generation == self.generation:
            self.formed = self.generation
            self.reports.append(self._channel.reports(self.generation))
            self._channel.confirm(self.generation)


class Workers(SimulatedWorkers):
    """One launcher's view of the processes."""

    def __init__(self, processes: Processes, life: Life) -> None:
        super().__init__(processes.go_on, processes.codes)
        self.now = processes.now
        self._processes, self._life, self._known = processes, life, 0

    def memory(self) -> WorkersMemory:
        records = [RankRecord(number, self.codes.get(number), Path("none"), 0.0) for number in range(self._known)]
        return WorkersMemory(records, frozenset(self._lives))

    def adopt(self, memory: WorkersMemory) -> None:
        self._known, self._lives = len(memory.records), set(memory.living)
        for number in [number for number in self._processes.members if number >= self._known]:
            del self._processes.members[number]  # nobody knows of it

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        super().start(number, slot, attempt, settings)
        first = int(settings["SHARDWISE_FIRST_ANNOUNCEMENT"])
        self._processes.members[number] = Member(number, self._processes, first)
        self._known = number + 1
        self._life.act()

    def wait(self, milliseconds: int) -> None:
        super().wait(milliseconds)
        heard = sorted((n, *t) for n, t in self._processes.heard.items())
        assert self.now < 500, (heard, self.codes, list(self._processes.members))

    def end_one(self, number: int) -> None:
        self._life.act()
        super().end_one(number)


class Mortal:
    """A launcher's store, whose owner may be killed before it has written something."""

    def __init__(self, store: SealedStore, life: Life) -> None:
        self._store, self._life = store, life

    def set(self, key: str, value: str) -> None:
        self._life.act()
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class MortalSuccession(Succession):
    """One whose launcher may be killed before it has written something down, or after."""

    life: Life

    def keep(self, agent: Mapping[str, Any] | None) -> None:
        self.life.act()
        super().keep(agent)
        self.life.act()


class Launchers:
    """The launchers of one job, one after the other."""

    first = frozenset({0, 2})

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.said, self.received = place, list[str](), list[signal.Signals]()
        self.processes = Processes()
        self.job = Job((__file__,), 3, elastic=Elastic(2, 3, retries=1))
        JobState(self.job, True, [], "run", TOKEN).write(place)

    def launch(self, last: int) -> bool | None:
        """Whether the job succeeded; `None` if this launcher was killed before, at its `last` act."""
        life, state, slots = Life(last), JobState.read(self.place), Slots(3, Budget(1, 600))
        slots.ready("", self.job.nproc, self.processes.now)
        workers: Any = self.workers(life)
        workers.adopt(state.workers)
        succession = MortalSuccession(self.place, state, workers.memory, self.said.append, start=lambda _: _a_process())
        succession.life = life
        self.processes.store = store = HashStore()
        elastic = self.job.elastic
        assert elastic is not None
        with SignalLog() as signals, Folder(None) as folder:
            signals.received += self.received
            context = Context(
                self.job, elastic, store, "h", 1, "run", folder, workers, slots, signals, self.said.append, TOKEN
            )
            context = replace(
                context, succession=succession, clock=lambda: self.processes.now, scaling=self.scaling(life)
            )
            workers.slots = lambda: context.slots
            agent = ElasticAgent(context, state.agent)
            channel: Any = agent._channel
            channel._store = Mortal(channel._store, life)
            try:
                return agent.run()
            except KilledError:
                self.processes.go_on()  # they have read what it had published until then
                return None

    def workers(self, life: Life) -> Workers:
        return Workers(self.processes, life)

    def scaling(self, life: Life) -> Scaling | None:
        """What asks for more ranks, in a job that grows by itself."""
        return None


class GrantedWorkers(Workers):
    """A second host comes as soon as it was asked for."""

    slots: Callable[[], Slots]

    def __init__(self, processes: Processes, life: Life, asked: list[int]) -> None:
        super().__init__(processes, life)
        self._asked = asked

    def events(self) -> Sequence[Event]:
        more = [HostReady("more", 1)] if 3 in self._asked and "more" not in self.slots().hosts else []
        return [*super().events(), *more]


class Growing(Launchers):
    """Those of a job that grows from two ranks to three by itself."""

    first = frozenset({0})
    room = None

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(place, monkeypatch)
        self.asked: list[int] = []
        self._life = Life(NEVER)
        self.job = replace(self.job, nproc=2)
        JobState(self.job, True, [], "run", TOKEN).write(place)

    def workers(self, life: Life) -> Workers:
        return GrantedWorkers(self.processes, life, self.asked)

    def scaling(self, life: Life) -> Scaling:
        self._life, asking = life, AtOnce(self, self.said.append)
        policy, sizes = Schedule(((0, 3),)), partial(Sizes.of, 2, 3, 1)
        return Scaling(policy, sizes, asking, self.said.append, lambda: datetime(2026, 11, 30, tzinfo=UTC), wanted=2)

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        self._life.act()
        self.asked.append(num_slots)
        self._life.act()


def _a_process() -> Any:
    return SimpleNamespace(poll=lambda: None)


def check(launchers: Launchers, *, first: frozenset[int] = frozenset({0, 2})) -> None:
    """The job has ended as it does without a killed launcher. `first` are the members that it began with, and that were
    not killed."""
    processes = launchers.processes
    assert all(len(texts) == 1 for texts in processes.heard.values()), "two announcements under one number"
    finished = {number for number, code in processes.codes.items() if code == 0}
    assert {0, 2} < finished
    assert len(finished) == 3
    (last,) = {processes.members[number].members for number in finished}
    assert set(last) == finished
    for number in finished:
        for reports in processes.members[number].reports[1:]:
            told = [report.decode().split(" of ") for report in reports if report]
            assert len({generation for _, generation in told}) == 1
            assert {int(member) for member, _ in told} >= first


def acts_of_one_launcher(place: Path, monkeypatch: pytest.MonkeyPatch, of: type[Launchers] = Launchers) -> int:
    launchers = of(place, monkeypatch)
    life = Life(NEVER)
    monkeypatch.setattr(f"{__name__}.Life", lambda last: life)
    assert launchers.launch(NEVER)
    monkeypatch.undo()
    check(launchers, first=launchers.first)
    return NEVER - life.left


def test_a_launcher_is_killed_at_any_point_of_its_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_acts = acts_of_one_launcher(tmp_path, monkeypatch)
    assert num_acts > 15
    for last in range(num_acts):
        launchers = Launchers(tmp_path, monkeypatch)
        assert launchers.launch(last) is None
        assert launchers.launch(NEVER), (last, launchers.said)
        check(launchers)


def test_and_the_next_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_acts = acts_of_one_launcher(tmp_path, monkeypatch)
    for first, second in itertools.product(range(0, num_acts, 7), range(0, 8, 3)):
        launchers = Launchers(tmp_path, monkeypatch)
        assert launchers.launch(first) is None
        if launchers.launch(second) is None:
            assert launchers.launch(NEVER), (first, second, launchers.said)
        check(launchers)


@varies
def test_a_launcher_is_killed_at_any_point_while_its_job_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has decided and not asked for yet is asked for by the next one, and no rank is lost by that."""
    num_acts = acts_of_one_launcher(tmp_path, monkeypatch, Growing)
    assert num_acts > 20
    for last in range(0, num_acts, 1 if THOROUGH else 3):
        launchers = Growing(tmp_path, monkeypatch)
        assert launchers.launch(last) is None
        assert launchers.launch(NEVER), (last, launchers.said)
        check(launchers, first=launchers.first)
        assert set(launchers.asked) <= {2, 3}
        assert 3 in launchers.asked


def test_a_job_that_was_told_to_end_is_ended_by_the_next_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM to the launcher, which is then killed before its ranks have ended."""
    launchers = Launchers(tmp_path, monkeypatch)
    assert launchers.launch(5) is None
    launchers.received.append(signal.SIGTERM)
    monkeypatch.setattr(Workers, "wait_for_end", lambda *_: Life(0).act())
    assert launchers.launch(NEVER) is None
    monkeypatch.undo()
    launchers.received.clear()
    assert launchers.launch(NEVER) is False
    assert launchers.processes.codes == dict.fromkeys(range(3), -signal.SIGTERM)


def test_what_is_written_down_makes_only_objects_of_this_package(tmp_path: Path) -> None:
    class Other:
        def __reduce__(self) -> tuple[Any, ...]:
            return subprocess.Popen, (["touch", str(tmp_path / "made")],)

    with pytest.raises(LaunchError, match=r"no elastic job that this version can take over: .*No such file"):
        JobState.read(tmp_path)
    (tmp_path / "launcher-state").write_bytes(pickle.dumps(Other()))
    with pytest.raises(LaunchError, match=r"names subprocess\.Popen"):
        JobState.read(tmp_path)
    assert not (tmp_path / "made").exists()
    tmp_path.chmod(0o777)
    with pytest.raises(LaunchError, match="others can write to it"):
        JobState.read(tmp_path)


def test_a_folder_that_is_no_jobs_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(LaunchError, match="has no elastic job"):
        take_over(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_standby_process_that_ends_is_replaced_unless_it_always_ends(tmp_path: Path) -> None:
    now, started, said = [0.0], list[float](), list[str]()
    ended = SimpleNamespace(poll=lambda: 1)

    def start(_: Path) -> Any:
        started.append(now[0])
        return ended

    state = JobState(Job((__file__,), 2), True, [], "run", TOKEN)
    succession = Succession(tmp_path, state, WorkersMemory, said.append, start, lambda: now[0])
    for now[0] in (0.0, 0.5, 1.5, 60.0, 61.0, 62.0, 63.0, 64.0, 65.0, 66.0):
        succession.tend()
    assert started == [0.0, 1.5, 60.0, 61.0, 62.0, 63.0, 64.0]
    assert said == [
        "5 processes ended that were to take over if this launcher is killed. The job goes on without: if this "
        "launcher is killed, its ranks end."
    ]


def test_a_rank_ends_after_a_time_without_a_launcher() -> None:
    launcher = [True]
    orphanhood = Orphanhood(lambda: launcher[0], 60)
    assert not orphanhood.lasts_too_long(0)
    launcher[0] = False
    assert not orphanhood.lasts_too_long(1000)
    assert not orphanhood.lasts_too_long(1059)
    launcher[0] = True
    assert not orphanhood.lasts_too_long(1060)  # another one has taken over
    launcher[0] = False
    assert not orphanhood.lasts_too_long(1061)
    assert orphanhood.lasts_too_long(1121)
