"""The launcher that takes over on one of the hosts: `python -m ... LISTENER`, started by the process there that was
elected. See [Note: agreement] in `launch/hosts/agreement.py`.

Hosts connect to the descriptor LISTENER. On its standard input it is given what its host has of the last launcher.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.mirror import HostsState, Mirror
from shardwise.launch.elastic.remote_host import RemoteHost
from shardwise.launch.elastic.remote_workers import RemoteWorkers
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.supervise_elastic import listen_again, run_attempts, store_at
from shardwise.launch.hosts.agreement import Kept
from shardwise.launch.hosts.connection import MAX_ARRIVALS, Arrivals, Connection
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.hosts.pod_server import PodCarrier, PodServer
from shardwise.launch.job import Elastic
from shardwise.launch.job_report import say
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog
from shardwise.system.launcher_address import LauncherAddress

_COME_SECONDS = 5.0
"""How long to wait for hosts that have not come, at most: see `gather`."""
_LOOK_SECONDS = 0.05


def take_over_hosts(kept: Kept, token: str, environment: Mapping[str, str], listener: socket.socket) -> int:
    """Go on with the job of `kept`, whose launcher is lost; returns the job's exit status. Hosts connect to the
    `listener`. Call it from the main thread. Raises `LaunchError`."""
    state = HostsState.of_text(kept.state)
    state = replace(state, number=kept.number + 1, plan=replace(state.plan, environment=environment))
    job, elastic = state.plan.job, state.plan.job.elastic
    assert elastic is not None
    ahead = state.time - time.monotonic()  # every host has a clock of its own
    with SignalLog() as signals, Folder(job.log_dir) as folder, ExitStack() as stack:
        address = str(listener.getsockname()[0])
        server = PodServer(listener, token, say)
        stack.callback(server.close)
        store = store_at(listen_again(job.port, address))
        arrivals: Arrivals = queue.Queue(MAX_ARRIVALS)
        logs = Logs(folder, job.log_dir is not None)
        workers = RemoteWorkers(state.plan, [], arrivals, (address, store.port), logs, say)
        stack.callback(workers.disconnect)
        wanted = state.workers.shares
        carriers = gather(server, set(wanted), elastic.host_timeout_seconds)
        server.close_with({"do": "bye"})  # whoever comes later was counted as lost
        hosts = {
            label: RemoteHost(wanted[label], label=label, seat=state.workers.seats[label], is_sealed=True)
            for label in carriers
        }
        for label, host in hosts.items():
            host.connection = Connection(host.share, ["host"], arrivals, host.numbers, carriers[label])
        workers.adopt(state.workers, hosts)
        mirror = Mirror(state, workers, elastic.launcher_timeout_seconds, lambda: time.monotonic() + ahead)
        slots = Slots.of(elastic)
        for share in wanted.values():
            slots.ready(share.host.name, share.num_ranks, mirror.now())
        context = Context(
            *(job, elastic, store, address, store.port, state.run_id, folder, workers, slots, signals, say, token),
            succession=mirror,
            clock=mirror.now,
        )
        mirror.keep(state.agent)
        agent = ElasticAgent(context, state.agent)
        workers.introduce(LauncherAddress(state.number, address, store.port), token)
        say(
            f"the launcher was lost. Process {os.getpid()} on {address} has taken over, with {len(carriers)} of "
            f"{len(wanted)} hosts. `kill {os.getpid()}` there ends the job.{_size_stays(elastic)}"
        )
        status = run_attempts(context, agent)
        say(f"the job has ended with status {status}.")
        folder.write_status(status)
        return status


def _size_stays(elastic: Elastic) -> str:
    """What is said of a job with `--autoscale`. The list of hosts is a file or a command of the first launcher's
    machine, and nothing has been agreed on about others."""
    if elastic.autoscale is None:
        return ""
    return " --autoscale ends here, as the list of hosts is on the machine where the job was started: the size stays."


def gather(
    server: PodServer,
    wanted: set[str],
    host_timeout_seconds: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> dict[str, PodCarrier]:
    """The connections of the last launcher's hosts, by label: of all, or of those that come in time. Hosts that have
    voted connect at once. A quarter of the silence after which they take a launcher for lost is not exceeded, because
    those that have come hear nothing meanwhile."""
    deadline = clock() + min(_COME_SECONDS, host_timeout_seconds / 4)
    while not wanted <= set(server.names()) and clock() < deadline:
        pause(_LOOK_SECONDS)
    return {label: server.take(label) for label in server.names() if label in wanted}


def main() -> int:
    given = json.load(sys.stdin)
    listener = socket.socket(fileno=int(sys.argv[1]))
    listener.setblocking(True)
    try:
        return take_over_hosts(Kept.of(given["kept"]), given["token"], given["environment"], listener)
    except ShardwiseError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
