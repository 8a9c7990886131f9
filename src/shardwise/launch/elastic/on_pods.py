"""Runs an elastic job in pods, which connect to this process.

The store is in this pod, so no pod with ranks is special. If this pod is lost, its controller starts another one of the
same name, to which the pods with ranks connect. If they were to keep what the last launcher had decided, the next one
has that from them and goes on with their ranks: see `mirror.py`. Otherwise all ranks have ended, and it starts the
script anew.

[Note: one launcher of pods] Two may live at once, where a node that was cut off comes back. As where hosts agree on
one, a launcher decides nothing that half of the pods do not have, and goes on from what more than half of them tell it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.mirror import CutOffError, HostsState, Mirror, let_others_take_over
from shardwise.launch.elastic.place import Place
from shardwise.launch.elastic.pod_workers import BACK_SECONDS, Pod, PodWorkers
from shardwise.launch.elastic.scaling import scaling_of
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.supervise_elastic import run_attempts, store_at
from shardwise.launch.elastic.workers import HostLeaves, HostLost, HostReady
from shardwise.launch.hosts.agreement import with_the_newest
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.hosts.pod_server import PodServer
from shardwise.launch.job_report import report_stop, say
from shardwise.launch.log_folder import Folder
from shardwise.launch.places.k8s_scale import index_of
from shardwise.launch.places.pods import PodsPlan
from shardwise.launch.port import listen
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import new_run_id
from shardwise.system.launcher_address import LauncherAddress

BEGIN_AGAIN = 143
"""The status of a launcher in whose place another one is to be started, as if it had been evicted."""
_FEWER_SECONDS = 60.0
"""How long to wait for more pods once there are enough to begin."""
_ANEW_SECONDS = 16.0
"""With `--launcher-timeout`: how long after the first pod has come others may still come that have ranks. They wait up
to 10 s for the answer of a launcher that is gone, and 5 s before they try the next one (`launch/hosts/pod.py`)."""
_TELL_SECONDS = 60.0
_LOOK_MILLISECONDS = 100


def run_on_pods(plan: PodsPlan, token: str, place: Place | None) -> int:
    """Run the ranks of `plan` in the pods that connect with the `token`. The status is that of `supervise_elastic`.
    With `--autoscale`, more pods come from `place`.

    Raises `LaunchError` for a port that is taken. Call it from the main thread.
    """
    job, elastic, address = plan.job, plan.job.elastic, plan.settings.address
    assert elastic is not None
    with SignalLog() as signals, Folder(job.log_dir) as folder, ExitStack() as stack:
        store = store_at(listen(plan.port + 1, address))
        server = PodServer(listen(plan.port, address), token, say)
        stack.callback(server.close)
        workers = PodWorkers(plan, server, (address, plan.port + 1), Logs(folder, job.log_dir is not None), say)
        stack.callback(workers.disconnect)
        slots = Slots.of(elastic, can_add=True)
        say(f"waiting for pods at {address}, port {plan.port}: {plan.describe_need()}.")
        last = _gather(plan, workers, slots, signals)
        if signals.received:
            return report_stop([], 0, signals.received[0], None)
        slots.sort_hosts(lambda pod: index_of(pod) or 0)  # pods that are placed near each other follow each other
        location = (address, plan.port + 1)
        run_id = new_run_id() if last is None else last.run_id
        context = Context(job, elastic, store, *location, run_id, folder, workers, slots, signals, say, token)
        if place is not None:
            context.scaling = scaling_of(elastic, place, plan.num_ranks, plan.unit)
            stack.callback(context.scaling.close)
        agent = None
        try:
            if last is not None:
                agent = _take_over(replace(last, plan=plan), workers, context)
            elif elastic.launcher_timeout_seconds:
                let_others_take_over(plan, workers, context)
            status = run_attempts(context, agent)
        except CutOffError as error:
            say(str(error))
            return BEGIN_AGAIN
        if not signals.received:  # else this pod may be evicted, and the next launcher needs the others
            workers.end_pods(status)
        return status


def _take_over(last: HostsState, workers: PodWorkers, context: Context) -> ElasticAgent:
    """Go on with the ranks of the last launcher, by what it has decided."""
    state = replace(last, number=last.number + 1)
    ahead = state.time - time.monotonic()  # it had a clock of its own
    pods, num_before = workers.returning(), len(state.workers.shares)
    workers.adopt(state.workers, pods)
    mirror = Mirror(state, workers, context.elastic.launcher_timeout_seconds, lambda: time.monotonic() + ahead)
    context.succession, context.clock = mirror, mirror.now
    mirror.keep(state.agent)
    agent = ElasticAgent(context, state.agent)
    workers.introduce(LauncherAddress(state.number, context.address, context.port), context.token)
    say(f"the launcher was lost, and this one has taken over, with {len(pods)} of {num_before} pods.")
    return agent


def _gather(
    plan: PodsPlan,
    workers: PodWorkers,
    slots: Slots,
    signals: SignalLog,
    fewer_seconds: float = _FEWER_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> HostsState | None:
    """Wait for the requested pods, or, after a while, for as many as the job needs. If pods have ranks of a launcher
    that is lost, wait for more than half of those, and return what it had decided.

    Pods that are new do not know whether others have such ranks. So it is not how many of them have come that decides
    whether there are others, but `_ANEW_SECONDS`."""
    assert plan.job.elastic is not None
    others = _LastLauncher(workers, plan.job.elastic.launcher_timeout_seconds)
    beginning = _Beginning(plan, slots, fewer_seconds, clock())
    last = None
    while last is None and not signals.received:
        workers.wait(_LOOK_MILLISECONDS)
        now = clock()
        if _note_events(workers, slots, now):
            beginning.note_pod(now)
        if workers.returning():
            last = others.decided(now)
        elif beginning.is_due(now):
            break
    workers.has_begun = True
    return last


def _note_events(workers: PodWorkers, slots: Slots, now: float) -> bool:
    """Count pods that have come, and those that are gone; returns whether any has come."""
    has_come = False
    for event in workers.events():
        match event:
            case HostReady():
                has_come = True
                say(slots.ready(event.host, event.num_slots, now))
            case HostLost():
                say(f"host {event.host} is gone ({event.why}).")
                slots.lost(event.host, now)
            case HostLeaves():
                say(f"host {event.host} {event.why}.")
                slots.leaves(event.host, now)
                workers.leave(event.host)
    return has_come


class _Beginning:
    """Whether there are pods enough to begin with, none of which has ranks of another launcher."""

    def __init__(self, plan: PodsPlan, slots: Slots, fewer_seconds: float, now: float) -> None:
        """`fewer_seconds`: how long to wait for more, once there are as many as the job needs."""
        assert plan.job.elastic is not None
        self._plan, self._slots, self._fewer_seconds = plan, slots, fewer_seconds
        self._least = plan.job.elastic.least
        self._enough_at = float("inf")
        self._anew_at = float("inf") if plan.job.elastic.launcher_timeout_seconds else 0.0
        self._tell_at, self._pause = now + _TELL_SECONDS, _TELL_SECONDS

    def note_pod(self, now: float) -> None:
        """A pod has come."""
        self._anew_at = min(self._anew_at, now + _ANEW_SECONDS)

    def is_due(self, now: float) -> bool:
        """Says from time to time what is missing."""
        num_slots, wanted = self._slots.num_usable(now), self._plan.job.nproc
        self._enough_at = min(self._enough_at, now) if num_slots >= self._least else float("inf")
        if now >= self._anew_at and (num_slots >= wanted or now - self._enough_at > self._fewer_seconds):
            return True
        if num_slots < wanted and now > self._tell_at:
            self._pause *= 2
            self._tell_at = now + self._pause
            say(f"{num_slots} of {self._plan.describe_need()}. Waiting for the others.")
        return False


class _LastLauncher:
    """What a launcher that is lost had decided, as pods with its ranks tell it.

    While half of them or fewer are back, the others may follow that launcher on a node that was cut off; nobody here
    can know, so it says what it waits for, and how to end that."""

    def __init__(self, workers: PodWorkers, launcher_timeout_seconds: float) -> None:
        self._workers, self._launcher_timeout_seconds = workers, launcher_timeout_seconds
        self._back_at = self._late_at = float("inf")
        self._told_of: set[str] = set()
        """The labels of the pods that it has said of that they are too few."""

    def decided(self, now: float) -> HostsState | None:
        """That, once more than half of its pods are back, and the others too or late; `None` before. There are some."""
        pods = self._workers.returning()
        told = {label: pod.returning for label, pod in pods.items()}
        newest = with_the_newest(told)
        self._back_at = min(self._back_at, now)
        if not newest:
            if now > self._back_at + BACK_SECONDS and self._told_of != told.keys():
                self._told_of = set(told)
                say(_too_few(pods, self._launcher_timeout_seconds))
            return None
        self._late_at = min(self._late_at, now + BACK_SECONDS)
        is_whole = {label for label, _, _ in told[newest[0]]["hosts"]} <= told.keys()
        return HostsState.of_text(told[newest[0]]["state"]) if is_whole or now > self._late_at else None


def _too_few(returning: Mapping[str, Pod], launcher_timeout_seconds: float) -> str:
    """What to do if half of the last launcher's pods, or fewer, are back: these are `returning`."""
    newest = max((pod.returning for pod in returning.values()), key=lambda one: (one["number"], one["version"]))
    names = ", ".join(sorted(pod.share.host.name for pod in returning.values()))
    return (
        f"{len(returning)} of {len(newest['hosts'])} pods with ranks of the last launcher have come back: {names}. To "
        f"go on with their ranks, it takes more than half of them, since the others may go on without these. If no "
        f"more come, the ranks that are there end within {launcher_timeout_seconds:g} s (--launcher-timeout), and the "
        f"script starts again from its last checkpoint. If the others are lost, delete these pods: then it need not "
        f"wait for that."
    )
