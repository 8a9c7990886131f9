"""A launcher of pods that is started in the place of one that was lost: it goes on with the ranks that pods have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardwise.launch.elastic import on_pods
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.mirror import HostsState
from shardwise.launch.elastic.on_pods import _ANEW_SECONDS, _gather
from shardwise.launch.elastic.pod_workers import BACK_SECONDS, PodWorkers
from shardwise.launch.elastic.remote_workers import RemoteMemory
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.workers import HostLost
from shardwise.launch.hosts.agreement import Kept, Seat
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.job import Elastic, Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.pods import PodsPlan
from shardwise.launch.places.ssh import SshSettings
from shardwise.launch.signals import SignalLog
from shardwise.version import __version__
from tests.pure.far_end import FarEnd

ELASTIC = Elastic(1, 3, launcher_timeout_seconds=60.0)
JOB = Job((__file__,), 3, elastic=ELASTIC)
PLAN = PodsPlan(JOB, tuple(Share(Host(f"pod {n}"), n, 1) for n in range(3)), SshSettings("/"), {}, slots_per_host=1)
LABELS = {"a": "host-0", "b": "host-1", "c": "host-2"}


class Pod(FarEnd):
    """The process in a pod, as a carrier of messages to it."""

    def __init__(self, name: str, version: int | None = None) -> None:
        """`version` is that of what the last launcher had decided; `None` if it has no ranks of that."""
        super().__init__()
        self.name = name
        if version is not None:
            kept = kept_by(name, version)
            self.say(kind="returning", label=kept.label, state=kept.state, **kept.voice())

    def answer(self, order: dict[str, Any]) -> None:
        match order["do"]:
            case "look":
                self.say(kind="facts", python="3", shardwise=__version__, torch="2", problem="", time=0.0)
            case "members":
                self.say(kind="members", address="", launcher="", problem="", port=0)
            case "reach":
                self.say(kind="reached", problem="")
            case "adopt":
                self.say(kind="adopted", members=order["members"], time=0.0)


def kept_by(name: str, version: int) -> Kept:
    shares = {label: Share(Host(pod), 0, 1) for pod, label in LABELS.items()}
    memory = RemoteMemory(shares, dict.fromkeys(shares, ("", 0)), {0: "a", 1: "b", 2: "c"}, {}, 0, 3)
    state = HostsState(PLAN, "run", number=4, version=version, workers=memory)
    seats = tuple(Seat(label, "", 0) for label in LABELS.values())
    return Kept(LABELS[name], 4, version, seats, (), 60, state.as_text())


class Server:
    """Pods connect, each of them when `comes` says so of those that are ready."""

    def __init__(self, *pods: Pod) -> None:
        self._pods = {pod.name: pod for pod in pods}
        self.comes: Callable[[Pod], bool] = lambda _: True

    def names(self) -> list[str]:
        return [name for name, pod in self._pods.items() if self.comes(pod)]

    def take(self, name: str) -> Pod:
        return self._pods.pop(name)


class Clock:
    """Stands still until something is so, and then goes on by a second at each look."""

    def __init__(self, starts: Callable[[], bool]) -> None:
        self.now, self._starts = 0.0, starts

    def __call__(self) -> float:
        self.now += self._starts()
        return self.now


def workers_with(server: Any, folder: Folder) -> PodWorkers:
    return PodWorkers(PLAN, server, ("h", 1), Logs(folder, keeps=False), lambda _: None)


@pytest.mark.parametrize("is_whole", [True, False])
def test_it_waits_for_more_than_half_and_goes_on_from_the_newest_version(is_whole: bool) -> None:
    """Pods without such ranks are not counted, however many they are and however long before, and connect again."""
    a, b, c, new = Pod("a", 7), Pod("b", 7), Pod("c", 6), [Pod(f"new-{n}") for n in range(3)]
    server = Server(*new, c, b, *([a] if is_whole else []))
    slots = Slots(3, Budget(1, 600), can_add=True)
    with Folder(None) as folder, SignalLog() as signals:
        workers = workers_with(server, folder)
        num_before = {"c": 0, "b": 1, "a": 2}
        server.comes = lambda pod: (
            pod in new or (slots.num_usable(0.0) >= len(new) and num_before[pod.name] == len(workers.returning()))
        )
        clock = Clock(lambda: not is_whole and len(workers.returning()) == 2)
        last = _gather(PLAN, workers, slots, signals, 0.0, clock)
        assert last is not None
        assert (last.version, last.number, last.run_id) == (7, 4, "run")
        pods = workers.returning()
        assert set(pods) == ({"host-0", "host-1", "host-2"} if is_whole else {"host-1", "host-2"})
        assert (clock.now > BACK_SECONDS) is not is_whole
        workers.adopt(last.workers, pods)
        assert [one.orders("adopt") for one in (b, c)] == [
            [{"do": "adopt", "members": [1]}],
            [{"do": "adopt", "members": [2]}],
        ]
        assert all(one.is_cut and not one.orders("adopt") for one in new)
        lost = [] if is_whole else [HostLost("a", (0,), "it was lost with the launcher")]
        assert workers.events() == lost
        workers.disconnect()


def test_it_says_what_it_waits_for_while_half_of_the_pods_or_fewer_are_back(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, said = Pod("a", 7), Pod("b", 7), list[str]()
    monkeypatch.setattr(on_pods, "say", said.append)
    server, slots = Server(a, b), Slots(3, Budget(1, 600), can_add=True)
    with Folder(None) as folder, SignalLog() as signals:
        workers = workers_with(server, folder)
        server.comes = lambda pod: pod is a or any("have come back" in one for one in said)
        clock = Clock(lambda: bool(workers.returning()))
        last = _gather(PLAN, workers, slots, signals, 0.0, clock)
        assert last is not None
        assert last.version == 7
        assert len(workers.returning()) == 2
        assert clock.now > BACK_SECONDS
        workers.disconnect()
    (told,) = [one for one in said if "have come back" in one]
    assert told.startswith("1 of 3 pods with ranks of the last launcher have come back: a. ")
    assert "the ranks that are there end within 60 s (--launcher-timeout)" in told
    assert "delete these pods" in told


@pytest.mark.parametrize("launcher_seconds", [60.0, 0.0])
def test_pods_that_come_back_after_that_are_sent_away(launcher_seconds: float) -> None:
    """Where ranks end with their launcher, nobody waits for them."""
    c, late = Pod("c"), Pod("a", 7)
    server, slots = Server(c, late), Slots(3, Budget(1, 600), can_add=True)
    with Folder(None) as folder, SignalLog() as signals:
        workers = workers_with(server, folder)
        server.comes = lambda pod: pod is c or workers.has_begun
        plan = replace(
            PLAN, job=replace(JOB, nproc=1, elastic=replace(ELASTIC, launcher_timeout_seconds=launcher_seconds))
        )
        clock = Clock(lambda: slots.num_usable(0.0) == 1)
        assert _gather(plan, workers, slots, signals, 0.0, clock) is None
        assert (clock.now >= _ANEW_SECONDS) == (launcher_seconds > 0)
        while not late.orders("bye"):
            workers.wait(1)
            workers.events()
        assert not late.orders("adopt")
        assert late.is_cut
        workers.disconnect()
