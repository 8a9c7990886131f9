"""Runs a job from its first rank to its last word, and returns the exit status."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time

from shardwise.errors import LaunchError
from shardwise.launch.agent import Agent, Stopped
from shardwise.launch.folder import Folder
from shardwise.launch.job import Job
from shardwise.launch.outcome import first_failure
from shardwise.launch.report import failure_summary, restart_line, stop_line
from shardwise.launch.signals import SignalLog
from shardwise.launch.store import LauncherStore


def supervise(job: Job, listener: socket.socket, on_cpu: bool) -> int:
    """Run the ranks of a checked `job`, which meet at `listener`, and return the exit status.

    0 if all ranks ended with 0; the status of the rank that failed first; 128 + n after signal n.
    To be called from the main thread, which must live as long as the ranks. Closes `listener`.
    """
    _silence_elastic()
    run_id = f"{os.getpid()}-{int(time.time())}"
    with SignalLog() as signals, Folder(job.log_dir) as folder:
        agent = Agent(
            job,
            LauncherStore(listener, run_id),
            folder,
            signals,
            on_cpu,
            say=_say,
            on_restart=lambda outcomes, attempt: restart_line(outcomes, attempt, job.max_restarts),
        )
        try:
            result = agent.run()
        except Stopped:
            return _report_stop(agent, signals.received[0], folder)
        except OSError as error:
            raise LaunchError(f"The ranks could not be started: {error}.") from error
        return _report_failure(agent, folder) if result.is_failed() else 0


def _report_failure(agent: Agent, folder: Folder) -> int:
    outcomes = agent.outcomes
    _say(failure_summary(outcomes, folder.place(agent.attempt)))
    first = first_failure(outcomes)
    return first.status if first else 1


def _report_stop(agent: Agent, received: signal.Signals, folder: Folder) -> int:
    outcomes, num_killed = agent.outcomes, agent.num_killed
    # a rank that ended by the signal takes its peers' connections with it: their exceptions are a
    # consequence. Only when nobody did, somebody failed to end well, and that is the news.
    if first_failure(outcomes) and not num_killed and not any(outcome.obeyed for outcome in outcomes):
        return _report_failure(agent, folder)
    _say(stop_line(outcomes, received, num_killed))
    # a closed terminal reaches ranks as SIGTERM, and so it counts
    return 128 + (signal.SIGTERM if received is signal.SIGHUP else received)


def _say(text: str) -> None:
    try:
        print(f"shardwise: {text}", file=sys.stderr, flush=True)
    except OSError:
        pass  # the terminal is gone; the ranks still have to be ended


def _silence_elastic() -> None:
    """Keep elastic's log to itself: whatever it would say there, we say in one report."""
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
