"""An agent of torch elastic with its own process handling: how ranks are started, watched and ended.

Torch elastic does the rendezvous, assigns ranks, and counts attempts and restarts. Its process handling is replaced by
subclassing `SimpleElasticAgent`, as its documentation describes: torch's own also signals the children of ranks, waits
again after a second Ctrl-C, always gives ranks 30 seconds after a peer has failed, and orders failures by whole
seconds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from shardwise.launch.echo import Echo
from shardwise.launch.environment import Attempt, rank_environment
from shardwise.launch.job import Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.outcome import Outcome
from shardwise.launch.port import ADDRESS
from shardwise.launch.ranks import POLL_SECONDS, Ranks
from shardwise.launch.signals import SignalLog
from shardwise.launch.store import LauncherStore

_LOOK_SECONDS = 0.25


class Stopped(Exception):  # noqa: N818 not an error: the job was asked to end
    """The job ended because the launcher received a signal."""


class Agent(SimpleElasticAgent):
    """Runs a job's ranks, attempt after attempt; `outcomes` are those of the last attempt.

    `say` is called with each status line; `on_restart` makes the line about a failed attempt.
    """

    def __init__(
        self,
        job: Job,
        store: LauncherStore,
        folder: Folder,
        signals: SignalLog,
        on_cpu: bool,
        bound: list[dict[str, str]],
        say: Callable[[str], None],
        on_restart: Callable[[list[Outcome], int], str],
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=job.nproc,
            rdzv_handler=store,
            entrypoint=job.command[0],
            max_restarts=job.max_restarts,
            monitor_interval=POLL_SECONDS,
        )
        super().__init__(spec)
        self.outcomes: list[Outcome] = []
        self.attempt = -1
        self.num_killed = 0
        self._job = job
        self._launcher_store = store
        self._folder = folder
        self._signals = signals
        self._on_cpu = on_cpu
        self._bound = bound
        self._say = say
        self._on_restart = on_restart
        self._ranks = Ranks()
        self._echo = Echo([])
        self._next_look = 0.0

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:  # noqa: ARG002
        if self._signals.received:
            raise Stopped  # while torch was being imported, or between two attempts
        self.attempt += 1
        if self.attempt:
            self._say(self._on_restart(self.outcomes, self.attempt))
        self._ranks = Ranks()
        files = [self._folder.files(self.attempt, rank) for rank in range(self._job.nproc)]
        pids = {
            rank: self._ranks.start(
                self._job.rank_command(), os.environ | self._environment(rank, str(paths.error)), paths
            )
            for rank, paths in enumerate(files)
        }
        self._echo = Echo(files)
        return pids

    def _environment(self, rank: int, error_file: str) -> dict[str, str]:
        attempt = Attempt(
            ADDRESS,
            self._launcher_store.port,
            self.attempt,
            self._job.max_restarts,
            self._launcher_store.get_run_id(),
            self._launcher_store.token,
        )
        settings = rank_environment(
            rank,
            self._job.nproc,
            attempt,
            os.environ,
            threads=self._job.threads,
            on_cpu=self._on_cpu,
            error_file=error_file,
        )
        return settings | self._bound[rank] | {"SHARDWISE_LAUNCHER_PID": str(os.getpid())}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        any_alive = self._ranks.any_alive()
        if self._signals.received:
            self._pass_on(self._signals.received[0])
            raise Stopped
        if self._ranks.any_failed(self._job.grace_seconds):
            self._end(signal.SIGTERM, hurry=lambda: bool(self._signals.received))
            return RunResult(state=WorkerState.FAILED)
        if any_alive:
            self._cancel_join_if_incomplete()
            return RunResult(state=WorkerState.HEALTHY)
        return RunResult(
            state=WorkerState.SUCCEEDED,
            return_values={worker.global_rank: None for worker in worker_group.workers},
        )

    def _cancel_join_if_incomplete(self) -> None:
        """If a rank ends before all have joined the world, tell those that wait; they do not watch each other yet."""
        if time.monotonic() > self._next_look:
            self._next_look = time.monotonic() + _LOOK_SECONDS
            self._launcher_store.cancel_rendezvous(self.attempt, *self._ranks.ended_and_living())

    def _pass_on(self, received: signal.Signals) -> None:
        # a closed terminal is a request to end; only SIGINT and SIGTERM mean that to a script
        number = signal.SIGTERM if received is signal.SIGHUP else received
        self._say(
            f"{received.name}: passed on to the ranks, which have {self._job.grace_seconds:g} s to end; "
            "a second signal kills them."
        )
        self._end(number, hurry=lambda: len(self._signals.received) > 1)

    def _end(self, number: signal.Signals, hurry: Callable[[], bool]) -> None:
        """Ask living ranks to end, kill those that do not, and record all outcomes."""
        self._ranks.send(number)
        self._ranks.wait(self._job.grace_seconds, hurry)
        self.num_killed = self._ranks.kill()
        self._ranks.kill_children()
        self.outcomes = [
            replace(outcome, last_status=self._launcher_store.last_status(outcome.rank, self.attempt))
            for outcome in self._ranks.outcomes()
        ]
        self._echo.close()
        self._folder.add_tracebacks(self.attempt, self.outcomes)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:  # noqa: ARG002
        # by now all ranks have ended, unless elastic itself broke down
        self._ranks.kill()
        self._echo.close()
