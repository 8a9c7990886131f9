"""Runs a job on this machine, reports its end, and returns the exit status."""

from __future__ import annotations

import logging
import socket

from shardwise.errors import LaunchError
from shardwise.launch.job import Job
from shardwise.launch.job_report import report_failure, report_stop, restart_line, say
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog
from shardwise.launch.store import LauncherStore
from shardwise.launch.torch_agent import Agent, Stopped
from shardwise.system.job_token import new_run_id


def supervise(job: Job, listener: socket.socket, on_cpu: bool, bound: list[dict[str, str]] | None = None) -> int:
    """Run the ranks of a checked `job`, whose store is at `listener`, and return the exit status.

    `bound` is from `Job.bindings`; without it, no rank is bound to cores or to a device.

    The status is 0 if all ranks ended with 0; else that of the rank that failed first; 128 + n after signal n. Call it
    from the main thread, which must live as long as the ranks. Closes `listener`.
    """
    _silence_elastic()
    run_id = new_run_id()
    with SignalLog() as signals, Folder(job.log_dir) as folder:
        agent = Agent(
            job,
            LauncherStore(listener, run_id),
            folder,
            signals,
            on_cpu,
            bound or [{} for _ in range(job.nproc)],
            say=say,
            on_restart=lambda outcomes, attempt: restart_line(outcomes, attempt, job.max_restarts),
        )
        try:
            result = agent.run()
        except Stopped:
            return report_stop(agent.outcomes, agent.num_killed, signals.received[0], folder.place(agent.attempt))
        except OSError as error:
            raise LaunchError(f"The ranks could not be started: {error}.") from error
        return report_failure(agent.outcomes, folder.place(agent.attempt)) if result.is_failed() else 0


def _silence_elastic() -> None:
    """Silence torch elastic's log: our own report contains the same."""
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
