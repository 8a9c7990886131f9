"""Runs an elastic job, reports its end, and returns the exit status."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in __all__

from shardwise.errors import LaunchError
from shardwise.launch.elastic.budget import Budget
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.elastic.main_loop import ElasticAgent
from shardwise.launch.elastic.slots import Slots
from shardwise.launch.elastic.succession import JobState, Succession, start_standby
from shardwise.launch.elastic.workers import LocalWorkers
from shardwise.launch.job import Job
from shardwise.launch.job_report import failure_summary, first_status, report_stop, restart_line, say
from shardwise.launch.log_folder import Folder
from shardwise.launch.orphans import forget_orphans
from shardwise.launch.port import ADDRESS, listen
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import new_run_id, new_token
from shardwise.system.launcher_address import LauncherAddress

_LOOK_SECONDS = 0.1


def supervise(
    job: Job, listener: socket.socket, on_cpu: bool, bound: list[dict[str, str]] | None = None, standby: str = ""
) -> int:
    """Like `shardwise.launch.supervise`, for a job with `elastic`.

    The status is 0 if all ranks of the last generation ended with 0, or left because they had asked to; that of the
    rank that failed first if too few were left. Ranks lost before, whose work the others took over, do not count.

    If this process is killed, another one takes over, which runs the module `standby`; see "When the launcher dies" in
    docs/elastic-protocol.md.
    """
    assert job.elastic is not None
    with SignalLog() as signals, Images() as images, Folder(job.log_dir, images.folder) as folder:
        shares = bound or [{} for _ in range(job.nproc)]
        state = JobState(job, on_cpu, shares, new_run_id(), new_token())
        workers = LocalWorkers(job, folder, images, on_cpu=on_cpu, bound=shares)
        succession = Succession(images.folder, state, workers.memory, say, _starter(standby))
        return _run_here(state, store_at(listener), images, folder, workers, signals, succession)


def take_over(place: Path, standby: str = "", *, since: float | None = None, standby_lock: int | None = None) -> int:
    """Go on with the job of the folder `place`, whose launcher was killed; returns the job's exit status. The ranks
    must be processes of this host and user. `standby` is as for `supervise`. `since` is when the launcher was killed,
    by `time.monotonic`, if that is known. `standby_lock` is closed once this process has its own standby process.

    Raises `LaunchError` if the job is over, or has a launcher. Call it from the main thread.
    """
    JobState.read(place)  # raises before anything is locked, or removed, in a folder that is no job's
    with SignalLog() as signals, Images.taken_over(place) as images, ExitStack() as stack:
        state = JobState.read(place)
        job, killed = state.job, state.pid
        os.environ.clear()
        os.environ.update(state.environment)
        os.chdir(state.directory)
        state.number, state.pid = state.number + 1, os.getpid()
        folder = stack.enter_context(Folder(job.log_dir, place))
        workers = LocalWorkers(job, folder, images, on_cpu=state.on_cpu, bound=state.bound)
        succession = Succession(place, state, workers.memory, say, _starter(standby))
        stack.callback(succession.dismiss)
        stack.callback(workers.close)  # the ranks end with a launcher that fails
        num_ranks = workers.adopt(state.workers, state.run_id)
        succession.tend()
        if standby_lock is not None:
            os.close(standby_lock)
        store = store_at(listen_again(job.port))
        forget_orphans(place)
        say(_taken_over(killed, num_ranks, None if since is None else time.monotonic() - since))
        status = _run_here(state, store, images, folder, workers, signals, succession)
        say(f"the job has ended with status {status}.")
        folder.write_status(status)
        return status


def _starter(standby: str) -> Callable[[Path], subprocess.Popen[bytes]] | None:
    return partial(start_standby, standby) if standby else None


def _taken_over(killed: int, num_ranks: int, seconds: float | None) -> str:
    me, after = os.getpid(), "" if seconds is None else f" after {seconds:.1f} s"
    go_on = "1 rank goes on" if num_ranks == 1 else f"{num_ranks} ranks go on"
    killed_one = f"the launcher (process {killed}) was killed."
    return f"{killed_one} Process {me} has taken over{after}: {go_on}. `kill {me}` ends the job."


def store_at(listener: socket.socket) -> TCPStore:
    """That of a job, in this process."""
    address, port = listener.getsockname()[:2]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def listen_again(port: int | None, address: str = ADDRESS) -> socket.socket:
    """At the port that the user has asked for, if it can be had again, or here."""
    try:
        return listen(port, address)
    except LaunchError:
        return listen(None, address)


def _run_here(
    state: JobState,
    store: TCPStore,
    images: Images,
    folder: Folder,
    workers: LocalWorkers,
    signals: SignalLog,
    succession: Succession,
) -> int:
    """Run a job on this host from its beginning, or from what was written down."""
    elastic = state.job.elastic
    assert elastic is not None
    slots = Slots(state.job.nproc, Budget(elastic.retries, elastic.retry_seconds))
    slots.ready("", state.job.nproc, time.monotonic())
    place = None if images.folder is None else LauncherAddress(state.number, store.host, store.port)
    context = Context(
        state.job,
        elastic,
        store,
        store.host,
        store.port,
        state.run_id,
        folder,
        workers,
        slots,
        signals,
        say,
        state.token,
        succession,
    )
    try:
        succession.keep(state.agent)
        succession.tend()
        agent = ElasticAgent(context, state.agent)
        if images.folder is not None and place is not None:
            place.write(images.folder)
        return run_attempts(context, agent)
    finally:
        succession.dismiss()


def run_attempts(context: Context, agent: ElasticAgent | None = None) -> int:
    """Run attempts until one succeeds or none is left; return the exit status, as `supervise` does. `agent` is one that
    goes on with an attempt."""
    agent = ElasticAgent(context) if agent is None else agent
    try:
        return _run(agent, context)
    except OSError as error:
        raise LaunchError(f"The ranks could not be started: {error}.") from error
    finally:
        agent.close()


def _run(agent: ElasticAgent, context: Context) -> int:
    budget = Budget(context.elastic.retries, context.elastic.retry_seconds)
    succession = context.succession
    if succession is not None and succession.state.restarts is not None:
        budget = succession.state.restarts
    while not agent.run():
        logs = context.folder.place(agent.attempt)
        if context.signals.received:
            return report_stop(agent.outcomes, agent.num_killed, context.signals.received[0], logs)
        many, used = context.job.max_restarts, ""
        can_restart = not agent.is_final and agent.attempt < many
        if (agent.needs_all or agent.gives_up) and not agent.is_final and not can_restart:
            can_restart, used = _may_start_all_again(budget, context), budget.in_words()
        if not can_restart:
            why = f"{agent.why_lost}\n\n" if agent.why_lost else ""
            say(why + failure_summary(agent.outcomes, logs))
            return first_status(agent.outcomes)
        say(restart_line(agent.outcomes, agent.attempt + 1, many, used, when=agent.given_up_when))
        if succession is not None:
            succession.state.restarts = budget
        agent.begin_again()
    return 0


def _may_start_all_again(budget: Budget, context: Context) -> bool:
    """Whether `--retries` allows a restart of all ranks; returns when it is due. [Note: jobs that need all] These ranks
    have reported that they cannot continue without one of them, ever or this time, and with `--elastic` a job has to
    outlive a rank."""
    moment = budget.ask("all", context.clock())
    while moment is not None and context.clock() < moment and not context.signals.received:
        time.sleep(_LOOK_SECONDS)
    return moment is not None and not context.signals.received
