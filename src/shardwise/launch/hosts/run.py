"""Runs a job on several hosts: connects, starts the ranks, reports the end, and returns the exit status."""

from __future__ import annotations

import queue
import signal
import time
from contextlib import ExitStack
from dataclasses import asdict, replace

from shardwise.errors import LaunchError
from shardwise.launch.environment import Attempt
from shardwise.launch.hosts.connection import MAX_ARRIVALS, Arrivals, Connection
from shardwise.launch.hosts.gather import (
    ANSWER_SECONDS,
    Answers,
    Stopped,
    copy_directory,
    have_a_port,
    look_at,
    next_arrival,
)
from shardwise.launch.hosts.host_messages import Message, outcome_from
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.job_report import report_failure, report_stop, restart_line, say
from shardwise.launch.log_folder import Folder
from shardwise.launch.outcome import Outcome
from shardwise.launch.places.hosts import Share
from shardwise.launch.places.ssh import ALIVE_SECONDS, SshPlan
from shardwise.launch.signals import SignalLog
from shardwise.system.job_token import new_run_id, new_token

_LOOK_SECONDS = 0.25
_CLOSE_SECONDS = 5.0


def run_ssh(plan: SshPlan) -> int:
    """Run the ranks of `plan` on its hosts. Raises `LaunchError` for problems found before any rank has started.

    The status is 0 if all ranks ended with 0; else that of the rank that failed first; 128 + n after signal n; 1 if a
    host was lost. Call it from the main thread.
    """
    with SignalLog() as signals, Folder(plan.job.log_dir) as folder, ExitStack() as stack:
        if plan.settings.copies:
            copy_directory(plan)
        arrivals: Arrivals = queue.Queue(MAX_ARRIVALS)
        hosts: list[Connection] = []
        stack.callback(lambda: close_all(hosts))
        answers = Answers(arrivals, lambda: bool(signals.received))
        try:
            hosts.extend(Connection(share, plan.connection(share), arrivals) for share in plan.shares)
            ahead = {host: ahead for host, (ahead, _) in look_at(hosts, plan, answers).items()}
            address, port = have_a_port(hosts, plan, answers)
            job = _HostsJob(plan, hosts, arrivals, folder, signals, ahead)
            return job.run(address, port, answers)
        except Stopped:
            return report_stop([], 0, signals.received[0], None)
        except FileNotFoundError as error:
            raise LaunchError("There is no ssh on this machine. Install OpenSSH's client.") from error


def close_all(hosts: list[Connection]) -> None:
    """Tell all hosts that the job is over, and close the connections."""
    for host in hosts:
        host.send("bye")
    for host in hosts:
        host.close(_CLOSE_SECONDS)


class _HostsJob:
    """Runs attempts until one succeeds or none is left."""

    def __init__(
        self,
        plan: SshPlan,
        hosts: list[Connection],
        arrivals: Arrivals,
        folder: Folder,
        signals: SignalLog,
        ahead: dict[Connection, float],
    ) -> None:
        self._plan, self._hosts, self._arrivals = plan, hosts, arrivals
        self._folder, self._signals, self._ahead = folder, signals, ahead
        self._number = 0
        self._outcomes: dict[Connection, list[Outcome]] = {}
        self._num_killed = 0
        self._ended: dict[Connection, list[int]] = {}
        self._lost: list[Connection] = []
        self._is_ending = False
        self._passed_on = 0
        self._logs = Logs(folder, keeps=plan.job.log_dir is not None)

    def run(self, address: str, port: int, answers: Answers) -> int:
        run_id, token = new_run_id(), new_token()
        while True:
            self._start(Attempt(address, port, self._number, self._plan.job.max_restarts, run_id, token), answers)
            self._follow()
            outcomes = self._all_outcomes()
            self._logs.close()
            self._folder.add_tracebacks(self._number, outcomes)
            if self._signals.received or self._lost or not self._is_ending:
                return self._report(outcomes)
            if self._number == self._plan.job.max_restarts:
                return report_failure(outcomes, self._folder.place(self._number))
            self._number += 1
            say(restart_line(outcomes, self._number, self._plan.job.max_restarts))

    def _start(self, attempt: Attempt, answers: Answers) -> None:
        """Start the ranks of all hosts, once the store on the first host is empty."""
        first = self._hosts[0]
        first.send("prepare", run_id=attempt.run_id, token=attempt.token)
        _, problems = answers.collect([first], "prepared", 3 * ANSWER_SECONDS, self._plan.job.python)
        if problems:
            raise LaunchError(f"{first.name}: {problems[first.name]}.")
        self._outcomes, self._ended, self._num_killed, self._is_ending = {}, {}, 0, False
        for index, host in enumerate(self._hosts):
            host.send(
                "start",
                first_rank=host.share.first_rank,
                position={"size": self._plan.num_ranks, "host": index, "num_hosts": len(self._hosts)},
                attempt=asdict(attempt),
                environment={**self._plan.environment, **devices_of(host.share)},
            )

    def _follow(self) -> None:
        """Handle messages until every host has reported the end of its ranks, or is lost."""
        for host in self._hosts:
            if host.is_lost:  # while the first host prepared
                self._lose_connection(host)
        alive_at = look_at = 0.0
        while len(self._outcomes) + len(self._lost) < len(self._hosts):
            arrival = next_arrival(self._arrivals, 0.05)
            if arrival is not None:
                self._take(*arrival)
            self._pass_on_signals()
            now = time.monotonic()
            if now > alive_at:
                alive_at = now + ALIVE_SECONDS
                self._send_all("alive")
            if now > look_at and any(self._ended.values()):
                look_at = now + _LOOK_SECONDS
                self._cancel_join_if_incomplete()

    def _take(self, host: Connection, message: Message) -> None:
        kind = message["kind"]
        if kind == "output":
            self._logs.write(self._number, message)
        elif kind == "ended":
            self._ended[host] = list(message["ranks"])
        elif kind == "failed":
            self._end(signal.SIGTERM)
        elif kind == "signal":
            say(f"{host.name}: received SIGTERM; passed on to all ranks.")
            self._signals.received.append(signal.SIGTERM)
        elif kind == "over":
            self._outcomes[host] = [outcome_from(one, self._ahead[host]) for one in message["outcomes"]]
            self._num_killed += int(message["killed"])
            if any(outcome.failed for outcome in self._outcomes[host]):
                self._end(signal.SIGTERM)
        elif kind == "problem":
            say(f"{host.name}: {message['text']}.")
            self._lose(host)
        elif kind == "lost":
            self._lose_connection(host)

    def _lose_connection(self, host: Connection) -> None:
        grace = self._plan.job.grace_seconds
        why = host.complaints.strip().rpartition("\n")[2] or f"ssh ended with status {host.status}"
        say(f"{host.name}: the connection is lost ({why.rstrip('.')}). Its ranks end within a minute and {grace:g} s.")
        self._lose(host)

    def _lose(self, host: Connection) -> None:
        if host not in self._outcomes and host not in self._lost:
            self._lost.append(host)
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._send_all("end", number=int(number))

    def _pass_on_signals(self) -> None:
        received = self._signals.received
        if len(received) > self._passed_on:
            if self._passed_on == 0:
                first = signal.SIGTERM if received[0] is signal.SIGHUP else received[0]
                grace = f"{self._plan.job.grace_seconds:g} s"
                name = received[0].name
                say(f"{name}: passed on to the ranks, which have {grace} to end; a second signal kills them.")
                self._end(first)
            else:
                self._send_all("kill")
            self._passed_on += 1

    def _cancel_join_if_incomplete(self) -> None:
        """If a rank ends before all have joined the world, tell those that wait; they do not watch each other yet."""
        ended = sorted(rank for ranks in self._ended.values() for rank in ranks)
        living = [rank for rank in range(self._plan.num_ranks) if rank not in ended]
        if living:
            self._hosts[0].send("cancel_rendezvous", attempt=self._number, ended=ended, living=living)

    def _all_outcomes(self) -> list[Outcome]:
        outcomes = [outcome for host in self._hosts for outcome in self._outcomes.get(host, [])]
        first = self._hosts[0]
        if not self._is_ending or first in self._lost:
            return outcomes
        first.send("last_status", attempt=self._number, ranks=[outcome.rank for outcome in outcomes])
        statuses = _last_status(self._arrivals, first)
        return [replace(outcome, last_status=statuses.get(outcome.rank, "")) for outcome in outcomes]

    def _report(self, outcomes: list[Outcome]) -> int:
        logs = self._folder.place(self._number)
        if self._signals.received:
            return report_stop(outcomes, self._num_killed, self._signals.received[0], logs)
        if self._lost:
            names = ", ".join(f"{host.share.in_words()}" for host in self._lost)
            say(f"the job ended because of the loss of {names}.")
            return 1
        return 0

    def _send_all(self, do: str, **details: object) -> None:
        for host in self._hosts:
            host.send(do, **details)


def _last_status(arrivals: Arrivals, host: Connection) -> dict[int, str]:
    """The last published status of each rank, from the first host; empty if it does not answer soon."""
    deadline = time.monotonic() + _CLOSE_SECONDS
    while time.monotonic() < deadline:
        arrival = next_arrival(arrivals, 0.1)
        if arrival is not None and arrival[0] is host and arrival[1]["kind"] in ("last_status", "lost"):
            return {int(rank): str(status) for rank, status in arrival[1].get("statuses", ())}
    return {}


def devices_of(share: Share) -> dict[str, str]:
    """The variable with the devices that a host's ranks may see, if the host list names them."""
    devices = share.host.devices
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
