"""Runs an elastic job from its first rank to its last word, and returns the exit status."""

from __future__ import annotations

import os
import socket
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.errors import LaunchError
from shardwise.launch.elastic.agent import ElasticAgent
from shardwise.launch.elastic.images import Images
from shardwise.launch.elastic.place import Place
from shardwise.launch.folder import Folder
from shardwise.launch.job import Job
from shardwise.launch.report import failure_summary, first_status, report_stop, restart_line, say
from shardwise.launch.signals import SignalLog


def supervise(job: Job, listener: socket.socket, on_cpu: bool, bound: list[dict[str, str]] | None = None) -> int:
    """As `shardwise.launch.supervise`, for a job with `elastic`.

    0 if all ranks of the last generation ended with 0, or left because they had asked to; the status of the rank that
    failed first, if too few were left. Ranks that died before, and whose work the others have taken over, do not count.
    """
    assert job.elastic is not None
    address, port = listener.getsockname()[:2]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with SignalLog() as signals, Folder(job.log_dir) as folder, Images() as images:
        place = Place(
            job,
            job.elastic,
            store,
            port,
            f"{os.getpid()}-{int(time.time())}",
            folder,
            images,
            signals,
            on_cpu,
            bound or [{} for _ in range(job.nproc)],
            say,
        )
        agent = ElasticAgent(place)
        try:
            return _run(agent, place)
        except OSError as error:
            raise LaunchError(f"The ranks could not be started: {error}.") from error
        finally:
            agent.close()


def _run(agent: ElasticAgent, place: Place) -> int:
    """Attempt after attempt."""
    while not agent.run():
        logs = place.folder.place(agent.attempt)
        if place.signals.received:
            return report_stop(agent.outcomes, agent.num_killed, place.signals.received[0], logs)
        if agent.is_final or agent.attempt >= place.job.max_restarts:
            why = f"{agent.why_lost}\n\n" if agent.why_lost else ""
            say(why + failure_summary(agent.outcomes, logs))
            return first_status(agent.outcomes)
        say(restart_line(agent.outcomes, agent.attempt + 1, place.job.max_restarts))
        agent.begin_again()
    return 0
