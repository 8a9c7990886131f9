"""Checks of all hosts before the first rank starts, and a port of the first host that the others can reach."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.hosts.connection import Arrivals, Connection
from shardwise.launch.hosts.host_messages import Message
from shardwise.launch.hosts.problems import connection_problem, contradictions, joined
from shardwise.launch.places.ssh import LEFT_OUT, SshPlan
from shardwise.system.units import format_bytes
from shardwise.version import __version__

ANSWER_SECONDS = 60.0
"""How long a host may take to start Python, in addition to the time to connect."""
RSYNC_SECONDS = 3600
_LIST_SECONDS = 60
_NUM_SHOWN = 5


class Stopped(Exception):  # noqa: N818 not an error: the job was asked to end
    """A signal arrived while hosts were being checked."""


class Answers:
    """Waits for the answers of several hosts at once."""

    def __init__(self, arrivals: Arrivals, is_stopped: Callable[[], bool]) -> None:
        self._arrivals = arrivals
        self._is_stopped = is_stopped

    def collect(
        self, hosts: Iterable[Connection], kind: str, seconds: float, python: str
    ) -> tuple[dict[Connection, Message], dict[str, str]]:
        """The `kind` message of each host, and by name the reason why others sent none.

        A host that is lost meanwhile is marked so, even if it has answered or is not asked.
        """
        waiting, answers, problems = set(hosts), {}, {}
        for host in [host for host in waiting if host.is_lost]:
            problems[host.name] = str(connection_problem(host.status, host.complaints, python))
            waiting.discard(host)
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline:
            if self._is_stopped():
                raise Stopped
            arrival = next_arrival(self._arrivals, 0.1)
            if arrival is None:
                continue
            host, message = arrival
            host.is_lost = host.is_lost or message["kind"] == "lost"
            if host not in waiting:
                continue
            if message["kind"] == kind:
                answers[host] = message
            elif message["kind"] == "lost":
                problems[host.name] = str(connection_problem(host.status, host.complaints, python))
            elif message["kind"] == "problem":
                problems[host.name] = str(message["text"])
            else:
                continue
            waiting.discard(host)
        silent = {host.name: str(connection_problem(None, host.complaints, python)) for host in waiting}
        return answers, problems | silent


def next_arrival(arrivals: Arrivals, seconds: float) -> tuple[Connection, Message] | None:
    """The next message, after at most `seconds`; None if there is none."""
    try:
        return arrivals.get(timeout=seconds)
    except queue.Empty:
        return None


def copy_directory(plan: SshPlan) -> None:
    """Copy this directory to all hosts at once, by rsync. Raises `LaunchError` that names all failures."""
    problems: dict[str, str] = {}

    def copy(number: int) -> None:
        share = plan.shares[number]
        try:
            done = subprocess.run(
                plan.copy(share),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RSYNC_SECONDS,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except FileNotFoundError:
            problems[share.host.name] = "there is no rsync on this machine; install it, or remove --rsync"
            return
        if done.returncode == 255:
            problems[share.host.name] = str(connection_problem(255, done.stderr, plan.job.python))
        elif "rsync: not found" in done.stderr or "rsync: command not found" in done.stderr:
            problems[share.host.name] = "it has no rsync; install it, or remove --rsync"
        elif done.returncode:
            lines = done.stderr.strip().splitlines() or ["it gave no reason"]
            problems[share.host.name] = f"rsync failed: {lines[0]}"

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(len(plan.shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise LaunchError(joined(problems))


def what_is_sent() -> str:
    """Which files of this directory `--rsync` would copy, as text. Uses only this machine."""
    try:
        listed = _listed()
    except FileNotFoundError:
        return "the files to send are unknown: this machine has no rsync"
    except subprocess.TimeoutExpired:
        return f"the files to send are unknown: listing them takes more than {_LIST_SECONDS} s"
    lines = [line.split(maxsplit=4) for line in listed.splitlines() if not line.startswith("d")]
    files = {words[4]: int(words[1]) for words in lines if len(words) == 5 and words[1].isdigit()}
    largest = sorted(files, key=lambda name: (-files[name], name))[:_NUM_SHOWN]
    shown = ", ".join(f"{name} ({format_bytes(files[name])})" for name in largest)
    return f"sent to each host: {len(files)} files, {format_bytes(sum(files.values()))}; the largest: {shown or 'none'}"


def list_of_files() -> str:
    """The files of this directory that `--rsync` copies, with sizes and times; `""` if they cannot be listed."""
    try:
        return "\n".join(line for line in _listed().splitlines() if not line.startswith("d"))
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _listed() -> str:
    command = ["rsync", "--recursive", "--list-only", "--no-human-readable", *LEFT_OUT, "./"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIST_SECONDS, check=False)
    return done.stdout


def look_at(hosts: list[Connection], plan: SshPlan, answers: Answers) -> dict[Connection, tuple[float, Message]]:
    """Check that all hosts can run the job; return by how many seconds their clocks are ahead of ours, and their facts.

    Raises `LaunchError` with the problems of all hosts.
    """
    asked_at = time.time()
    for host in hosts:
        host.send("look", directory=plan.settings.directory, job=job_as_message(plan, host))
    seconds = plan.settings.connect_seconds + ANSWER_SECONDS
    facts, problems = answers.collect(hosts, "facts", seconds, plan.job.python)
    problems |= {host.name: reply["problem"] for host, reply in facts.items() if reply["problem"]}
    in_order = {host.name: facts[host] for host in hosts if host in facts}
    problems |= contradictions(in_order, __version__)
    refuse(problems, hosts)
    midpoint = (asked_at + time.time()) / 2  # hosts answer when Python has started, the slowest last
    return {host: (float(reply["time"]) - midpoint, reply) for host, reply in facts.items()}


def have_a_port(hosts: list[Connection], plan: SshPlan, answers: Answers) -> tuple[str, int]:
    """Address and port of the store, after all hosts have tried to connect. Raises `LaunchError` that names all hosts
    that cannot reach it."""
    first, others = hosts[0], hosts[1:]
    first.send("listen", address=plan.settings.address, port=plan.job.port)
    listening, problems = answers.collect([first], "listening", ANSWER_SECONDS, plan.job.python)
    refuse(problems, hosts)
    address, port = str(listening[first]["address"]), int(listening[first]["port"])
    if others and address in ("127.0.0.1", "::1"):
        raise LaunchError(
            f"{first.name} is this machine, and other hosts cannot reach it at {address}. Name an address at which "
            f"they can with --master-addr."
        )
    require_reach(others, first.name, (address, port), plan.job.python, answers)
    return address, port


def require_reach(hosts: list[Connection], first: str, store: tuple[str, int], python: str, answers: Answers) -> None:
    """Check that `hosts` reach `first` at an address and port. Raises `LaunchError` that names all that do not."""
    address, port = store
    for host in hosts:
        host.send("reach", address=address, port=port)
    reached, problems = answers.collect(hosts, "reached", ANSWER_SECONDS, python)
    cure = "is the port blocked? Open it and name it with --port, or name another address with --master-addr"
    problems |= {
        host.name: f"it does not reach {first} at {address}, port {port} ({reply['problem']}); {cure}"
        for host, reply in reached.items()
        if reply["problem"]
    }
    refuse(problems, hosts)


def job_as_message(plan: SshPlan, host: Connection) -> dict[str, Any]:
    """The job for one host, without paths of this machine."""
    return asdict(plan.job) | {"nproc": host.share.num_ranks, "log_dir": None, "elastic": None}


def refuse(problems: dict[str, str], hosts: list[Connection]) -> None:
    """Raise `LaunchError` if there are problems, by name of the host."""
    if problems:
        in_order = {host.name: problems[host.name] for host in hosts if host.name in problems}
        raise LaunchError(joined(in_order))
