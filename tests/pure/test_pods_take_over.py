"""A launcher of pods that is started in the place of one that was lost: it goes on with the ranks that pods have."""

from __future__ import annotations

import io
import json
import queue
from dataclasses import replace
from typing import Any

import pytest

from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.mirror import HostsState
from shardwise.launch.elastic.on_pods import _gather
from shardwise.launch.elastic.pods import PodWorkers
from shardwise.launch.elastic.remote import RemoteMemory
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.workers import HostLost
from shardwise.launch.hosts.agreement import Kept, Seat
from shardwise.launch.hosts.host_messages import packed
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.job import Elastic, Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.pods import PodsPlan
from shardwise.launch.places.ssh import SshSettings
from shardwise.launch.signals import SignalLog
from shardwise.version import __version__
from tests.thorough import soak

JOB = Job((__file__,), 3, elastic=Elastic(1, 3))
PLAN = PodsPlan(JOB, tuple(Share(Host(f"pod {n}"), n, 1) for n in range(3)), SshSettings("/"), {}, slots_per_host=1)
LABELS = {"a": "host-0", "b": "host-1", "c": "host-2"}


class Pod:
    """The process in a pod, as a carrier of messages to it."""

    def __init__(self, name: str, version: int | None = None) -> None:
        """`version` is that of what the last launcher had decided; `None` if it has no ranks of that."""
        self.name, self.sent, self.is_cut = name, list[dict[str, Any]](), False
        self.stdin, self.stdout, self.stderr = self, self, io.BytesIO()
        self._lines: queue.Queue[bytes] = queue.Queue()
        if version is not None:
            kept = kept_by(name, version)
            self._say("returning", label=kept.label, state=kept.state, **kept.voice())

    def _say(self, kind: str, **more: Any) -> None:
        self._lines.put(packed({"kind": kind, **more}))

    def write(self, block: bytes) -> None:
        order = json.loads(block[1:])
        self.sent.append(order)
        match order["do"]:
            case "look":
                self._say("facts", python="3", shardwise=__version__, torch="2", problem="", time=0.0)
            case "members":
                self._say("members", address="", launcher="", problem="", port=0)
            case "reach":
                self._say("reached", problem="")
            case "adopt":
                self._say("adopted", members=order["members"], time=0.0)

    def readline(self, limit: int) -> bytes:
        return self._lines.get()

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int:
        self._lines.put(b"")
        return 0

    def kill(self) -> None:
        self.is_cut = True
        self._lines.put(b"")

    def orders(self, *kinds: str) -> list[dict[str, Any]]:
        return [order for order in self.sent if order["do"] in kinds]


def kept_by(name: str, version: int) -> Kept:
    shares = {label: Share(Host(pod), 0, 1) for pod, label in LABELS.items()}
    memory = RemoteMemory(shares, dict.fromkeys(shares, ("", 0)), {0: "a", 1: "b", 2: "c"}, {}, 0, 3)
    state = HostsState(PLAN, "run", number=4, version=version, workers=memory)
    seats = tuple(Seat(label, "", 0) for label in LABELS.values())
    return Kept(LABELS[name], 4, version, seats, (), 60, state.as_text())


class Server:
    """Pods that have connected, each of them after so many looks."""

    def __init__(self, **pods: tuple[int, Pod]) -> None:
        self._pods, self._num_looks = pods, 0

    def names(self) -> list[str]:
        self._num_looks += 1
        return [name for name, (at, _) in self._pods.items() if at <= self._num_looks]

    def take(self, name: str) -> Pod:
        return self._pods.pop(name)[1]


def workers_with(server: Any, folder: Folder) -> PodWorkers:
    return PodWorkers(PLAN, server, ("h", 1), Logs(folder, keeps=False), lambda _: None)


@soak("if enough new pods are ready before one with ranks has said so, the job starts anew: threads race here")
@pytest.mark.parametrize("is_whole", [True, False])
def test_it_waits_for_more_than_half_and_goes_on_from_the_newest_version(is_whole: bool) -> None:
    """Pods without such ranks are not counted, however many they are, and connect again afterwards."""
    c, b, new = Pod("c", 6), Pod("b", 7), [Pod(f"new-{n}") for n in range(3)]
    later = {"a": (12, Pod("a", 7))} if is_whole else {}
    fresh = {one.name: (1, one) for one in new}
    server = Server(c=(1, c), b=(8, b), **fresh, **later)
    slots = Slots(3, Budget(1, 600), can_add=True)
    with Folder(None) as folder, SignalLog() as signals:
        workers = workers_with(server, folder)
        last = _gather(PLAN, workers, slots, signals, 0.0, back_seconds=3.0 if is_whole else 0.1)
        assert last is not None
        assert (last.version, last.number, last.run_id) == (7, 4, "run")
        pods = workers.returning()
        assert set(pods) == ({"host-0", "host-1", "host-2"} if is_whole else {"host-1", "host-2"})
        workers.adopt(last.workers, pods)
        assert [one.orders("adopt") for one in (b, c)] == [
            [{"do": "adopt", "members": [1]}],
            [{"do": "adopt", "members": [2]}],
        ]
        assert all(one.is_cut and not one.orders("adopt") for one in new)
        lost = [] if is_whole else [HostLost("a", (0,), "it was lost with the launcher")]
        assert workers.events() == lost
        workers.disconnect()


def test_pods_that_come_back_after_that_are_sent_away() -> None:
    c, late = Pod("c"), Pod("a", 7)
    with Folder(None) as folder, SignalLog() as signals:
        workers = workers_with(Server(c=(1, c), a=(40, late)), folder)
        plan = replace(PLAN, job=replace(JOB, nproc=1))
        assert _gather(plan, workers, Slots(3, Budget(1, 600), can_add=True), signals, 0.0) is None
        while not late.orders("bye"):
            workers.wait(1)
            workers.events()
        assert not late.orders("adopt")
        assert late.is_cut
        workers.disconnect()
