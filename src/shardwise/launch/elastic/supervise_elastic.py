"""Runs an elastic job, reports its end, and returns the exit status."""

from __future__ import annotations

import os
import socket
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.errors import LaunchError
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.workers import LocalWorkers
from shardwise.launch.job import Job
from shardwise.launch.job_report import failure_summary, first_status, report_stop, restart_line, say
from shardwise.launch.log_folder import Folder
from shardwise.launch.signals import SignalLog

_LOOK_SECONDS = 0.1


def supervise(job: Job, listener: socket.socket, on_cpu: bool, bound: list[dict[str, str]] | None = None) -> int:
    """Like `shardwise.launch.supervise`, for a job with `elastic`.

    The status is 0 if all ranks of the last generation ended with 0, or left because they had asked to; that of the
    rank that failed first if too few were left. Ranks lost before, whose work the others took over, do not count.
    """
    assert job.elastic is not None
    address, port = listener.getsockname()[:2]
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    with SignalLog() as signals, Folder(job.log_dir) as folder, Images() as images:
        shares = bound or [{} for _ in range(job.nproc)]
        slots = Slots(job.nproc, Budget(job.elastic.retries, job.elastic.retry_seconds))
        slots.ready("", job.nproc, time.monotonic())
        workers = LocalWorkers(job, folder, images, on_cpu=on_cpu, bound=shares)
        run_id = f"{os.getpid()}-{int(time.time())}"
        return run_attempts(
            Context(job, job.elastic, store, address, port, run_id, folder, workers, slots, signals, say)
        )


def run_attempts(context: Context) -> int:
    """Run attempts until one succeeds or none is left; return the exit status, as `supervise` does."""
    agent = ElasticAgent(context)
    try:
        return _run(agent, context)
    except OSError as error:
        raise LaunchError(f"The ranks could not be started: {error}.") from error
    finally:
        agent.close()


def _run(agent: ElasticAgent, context: Context) -> int:
    budget = Budget(context.elastic.retries, context.elastic.retry_seconds)
    while not agent.run():
        logs = context.folder.place(agent.attempt)
        if context.signals.received:
            return report_stop(agent.outcomes, agent.num_killed, context.signals.received[0], logs)
        many, used = context.job.max_restarts, ""
        can_restart = not agent.is_final and agent.attempt < many
        if agent.needs_all and not agent.is_final and not can_restart:
            can_restart, used = _may_start_all_again(budget, context), budget.in_words()
        if not can_restart:
            why = f"{agent.why_lost}\n\n" if agent.why_lost else ""
            say(why + failure_summary(agent.outcomes, logs))
            return first_status(agent.outcomes)
        say(restart_line(agent.outcomes, agent.attempt + 1, many, used))
        agent.begin_again()
    return 0


def _may_start_all_again(budget: Budget, context: Context) -> bool:
    """Whether `--retries` allows a restart of all ranks; returns when it is due. [Note: jobs that need all] These ranks
    have reported that they cannot continue without one of them, and with `--elastic` a job has to outlive a rank."""
    moment = budget.ask("all", time.monotonic())
    while moment is not None and time.monotonic() < moment and not context.signals.received:
        time.sleep(_LOOK_SECONDS)
    return moment is not None and not context.signals.received
