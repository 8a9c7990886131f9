"""One host of an elastic job: its connection, its state, and the checks before it gets ranks."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass, field
from typing import Literal

from shardwise.launch.hosts.connection import Arrivals, Connection
from shardwise.launch.hosts.gather import ANSWER_SECONDS, RSYNC_SECONDS, job_as_message
from shardwise.launch.hosts.host_messages import Message
from shardwise.launch.hosts.problems import connection_problem, contradictions
from shardwise.launch.places.hosts import Share
from shardwise.launch.places.ssh import SshPlan
from shardwise.version import __version__

FIRST_PAUSE_SECONDS = 1.0
"""The pause before the first attempt to reconnect; later ones grow."""
State = Literal["asked", "ready", "leaving", "lost"]


@dataclass(eq=False)
class RemoteHost:
    """One host of the host list."""

    share: Share
    connection: Connection | None = None
    state: State = "lost"
    facts: Message = field(default_factory=dict)
    ahead_seconds: float = 0.0
    """By how much its clock is ahead of ours."""
    asked_at: float = 0.0
    """When it was asked for facts, as wall-clock time."""
    deadline: float = 0.0
    """When it must have answered."""
    try_at: float = 0.0
    pause_seconds: float = FIRST_PAUSE_SECONDS
    complaint: str = ""
    """Why it could not be used, as last reported."""
    is_listed: bool = True
    is_copied: bool = False
    """Whether it has the copy of this machine's directory that `--rsync` makes."""
    numbers: set[int] = field(default_factory=set)
    """The processes started over the present connection."""
    label: str = ""
    """By which it counts where hosts agree on a launcher; the process at its other end has it, and no other one."""
    seat: tuple[str, int] = "", 0
    """Where that process listens for others; port 0: nowhere."""
    num_kept: int = -1
    """The last version of the launcher's decisions that it has."""
    is_sealed: bool = False
    """Whether others can read the connection, so that nothing secret is sent."""

    @property
    def name(self) -> str:
        return self.share.host.name

    def connect(self, plan: SshPlan, arrivals: Arrivals, now: float) -> None:
        """Open a connection, and ask for facts."""
        command, copies = plan.connection(self.share), plan.settings.copies and not self.is_copied
        if copies:
            first = f"{shlex.join(plan.copy(self.share))} </dev/null >&2"
            command = ["sh", "-c", f"{first} && exec {shlex.join(command)}"]
        self.numbers = set()
        self.label, self.seat, self.num_kept, self.is_sealed = "", ("", 0), -1, False
        connection = Connection(self.share, command, arrivals, self.numbers)
        self.ask(connection, plan, now + (RSYNC_SECONDS if copies else 0))

    def ask(self, connection: Connection, plan: SshPlan, now: float) -> None:
        """Over a new connection, whether it can be used."""
        self.connection = connection
        self.state, self.asked_at = "asked", time.time()
        self.deadline = now + plan.settings.connect_seconds + ANSWER_SECONDS
        directory = plan.settings.directory
        self.connection.send("look", directory=directory, job=job_as_message(plan, self.connection))

    def why_given_up(self, now: float, silence_seconds: float, python: str) -> str:
        """Why the host is given up; empty if it is not."""
        assert self.connection is not None
        if self.state == "asked":
            return str(connection_problem(None, self.connection.complaints, python)) if now > self.deadline else ""
        is_silent = now - self.connection.heard > silence_seconds
        return f"nothing was heard of it for {silence_seconds:g} s" if is_silent else ""

    def why_closed(self, python: str) -> str:
        """Why the connection has ended."""
        assert self.connection is not None
        if self.state == "asked":
            return str(connection_problem(self.connection.status, self.connection.complaints, python))
        last = self.connection.complaints.strip().rpartition("\n")[2].rstrip(".")
        if self.is_sealed:
            return "it has closed the connection"
        return (
            f"the connection is lost: {last or f'{self.connection.command} ended with status {self.connection.status}'}"
        )


class HostChecks:
    """What a new host is asked, one question after the other: its facts, whether it can run members, and whether it
    reaches the store."""

    def __init__(self, store: tuple[str, int], silence_seconds: float, first_facts: Message) -> None:
        """`store` is the address and port of the store. `first_facts` are those of the first host, if there is one."""
        self._store, self._silence_seconds, self._first_facts = store, silence_seconds, first_facts

    def take(self, host: RemoteHost, message: Message) -> str:
        """Take an answer and ask the next question; after the last one the host is ready. Returns why the host cannot
        be used; empty if it can so far."""
        assert host.connection is not None
        address, port = self._store
        problem = str(message["problem"])
        if message["kind"] == "facts":
            host.ahead_seconds = float(message["time"]) - (host.asked_at + time.time()) / 2
            self._first_facts = self._first_facts or message
            versions = {"the first host": self._first_facts, host.name: message}
            problem = problem or contradictions(versions, __version__).get(host.name, "")
            host.connection.send("members", silence_seconds=self._silence_seconds)
        elif message["kind"] == "members":
            host.seat = message["address"], message["port"]
            host.connection.send("reach", address=address, port=port)
        elif problem:
            return f"it cannot reach this machine at {address}, port {port} ({problem})"
        else:
            host.state, host.pause_seconds, host.complaint = "ready", FIRST_PAUSE_SECONDS, ""
            host.is_copied = True
        return problem
