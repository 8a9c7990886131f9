"""Runs an elastic job on several hosts: connects, runs attempts, and returns the exit status.

The store is on this machine. If that is lost, hosts agree on one of them that has the next one: see `mirror.py`.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import ExitStack

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.errors import LaunchError
from shardwise.launch.elastic.code_copy import CodeCopy
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.host_list import EVERY_SECONDS, HostList
from shardwise.launch.elastic.mirror import let_others_take_over
from shardwise.launch.elastic.place import ListedPlace
from shardwise.launch.elastic.remote_host import RemoteHost
from shardwise.launch.elastic.remote_workers import RemoteWorkers
from shardwise.launch.elastic.scaling import scaling_of
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.supervise_elastic import run_attempts, store_at
from shardwise.launch.hosts.connection import MAX_ARRIVALS, Arrivals, Connection
from shardwise.launch.hosts.facts import interface_of
from shardwise.launch.hosts.gather import (
    ANSWER_SECONDS,
    Answers,
    Stopped,
    copy_directory,
    look_at,
    refuse,
    require_reach,
)
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.hosts.run import close_all
from shardwise.launch.job_report import report_stop, say
from shardwise.launch.log_folder import Folder
from shardwise.launch.places.hosts import Host
from shardwise.launch.places.ssh import SshPlan
from shardwise.launch.port import listen
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import new_run_id, new_token
from shardwise.system.listening import listen_at

_LOOPBACK = ("127.0.0.1", "::1")


def run_on_hosts(
    plan: SshPlan,
    read_hosts: Callable[[], list[Host]] | None = None,
    every_seconds: float = EVERY_SECONDS,
    place: ListedPlace | None = None,
) -> int:
    """Run the ranks of `plan`, whose job is elastic, on its hosts. `read_hosts` is called periodically for changes.
    With `--autoscale` it is that of the `place`.

    The status is that of `supervise_elastic`. Raises `LaunchError` for problems found before any rank has started. Call
    it from the main thread.
    """
    job, elastic = plan.job, plan.job.elastic
    assert elastic is not None
    with SignalLog() as signals, Folder(job.log_dir) as folder, ExitStack() as stack:
        code = CodeCopy(say) if plan.settings.copies else None
        if code is not None:
            copy_directory(plan)
        arrivals: Arrivals = queue.Queue(MAX_ARRIVALS)
        hosts: list[RemoteHost] = []
        stack.callback(lambda: close_all([host.connection for host in hosts if host.connection is not None]))
        answers = Answers(arrivals, lambda: bool(signals.received))
        try:
            _connect(plan, hosts, arrivals)
            address, port, store = _prepare(plan, hosts, answers)
        except Stopped:
            return report_stop([], 0, signals.received[0], None)
        except FileNotFoundError as error:
            name = plan.connection(plan.shares[0])[0]
            raise LaunchError(f"There is no {name} on this machine. Install it, or start the job elsewhere.") from error
        host_list = None
        if read_hosts is not None:
            host_list = HostList(read_hosts, [share.host for share in plan.shares], say, every_seconds)
            stack.callback(host_list.close)
        logs = Logs(folder, job.log_dir is not None)
        workers = RemoteWorkers(plan, hosts, arrivals, (address, port), logs, say, host_list)
        workers.code = code
        stack.callback(workers.disconnect)
        scaling = None
        if place is not None:
            place.lost, workers.released = workers.lost_hosts, place.release
            scaling = scaling_of(elastic, place, plan.num_ranks, place.unit)
            stack.callback(scaling.close)
            stack.callback(place.close)
        slots = Slots.of(elastic, can_add=read_hosts is not None)
        for host in hosts:
            slots.ready(host.name, host.share.num_ranks, time.monotonic())
        context = Context(
            job, elastic, store, address, port, new_run_id(), folder, workers, slots, signals, say, new_token()
        )
        context.scaling = scaling
        if elastic.launcher_timeout_seconds and _outlives_its_launcher(plan):
            let_others_take_over(plan, workers, context)
        return run_attempts(context)


def _outlives_its_launcher(plan: SshPlan) -> bool:
    """Whether processes on hosts go on when their connection breaks: a step of Slurm ends with its `srun`."""
    return type(plan) is SshPlan


def _connect(plan: SshPlan, hosts: list[RemoteHost], arrivals: Arrivals) -> None:
    for share in plan.shares:
        host = RemoteHost(share)
        host.connection = Connection(share, plan.connection(share), arrivals, host.numbers)
        hosts.append(host)


def _prepare(plan: SshPlan, hosts: list[RemoteHost], answers: Answers) -> tuple[str, int, TCPStore]:
    """Check all hosts, and create a store that they can reach. Raises `LaunchError` that names all problems."""
    assert plan.job.elastic is not None
    connections = [host.connection for host in hosts if host.connection is not None]
    looked = look_at(connections, plan, answers)
    for connection in connections:
        connection.send("members", silence_seconds=plan.job.elastic.host_timeout_seconds)
    replies, problems = answers.collect(connections, "members", ANSWER_SECONDS, plan.job.python)
    refuse(problems | {host.name: one["problem"] for host, one in replies.items() if one["problem"]}, connections)
    seen = [str(replies[connection]["launcher"]) for connection in connections]
    address = plan.settings.address or _own_address(seen)
    listener = listen_at(address, plan.job.port or 0) if plan.settings.address else listen(plan.job.port, address)
    store = store_at(listener)
    require_reach(connections, "this machine", (address, store.port), plan.job.python, answers)
    for host in hosts:
        assert host.connection is not None
        host.ahead_seconds, host.facts = looked[host.connection]
        host.seat = replies[host.connection]["address"], replies[host.connection]["port"]
        host.state, host.is_copied = "ready", True
        host.connection.heard = time.monotonic()
    return address, store.port, store


def _own_address(seen: list[str]) -> str:
    """This machine's address, as hosts see it in their ssh connection."""
    known = [address for address in seen if address]
    address = next((address for address in known if address not in _LOOPBACK), next(iter(known), ""))
    if not address:
        raise LaunchError(
            "Hosts do not know this machine's address, since SSH_CONNECTION is not set there. Name an address at which "
            "they reach it with --master-addr."
        )
    if not interface_of(address):
        raise LaunchError(
            f"Hosts see this machine at {address}, which is none of its own addresses. Name an address at which they "
            f"reach it with --master-addr."
        )
    return address
