"""What makes the launcher of an elastic job on several hosts replaceable: hosts keep what it has decided.

In the place of the file of one host (see [Note: what is written down] in `succession.py`), each host has it in memory:
see [Note: agreement] in `launch/hosts/agreement.py`. Nothing secret is in it, since hosts that follow a later launcher
get it over connections that others can read; they have been trusted with that when they were reached by ssh.
"""

from __future__ import annotations

import base64
import pickle
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shardwise.errors import LaunchError
from shardwise.launch.elastic.context import Context
from shardwise.launch.elastic.remote_host import RemoteHost
from shardwise.launch.elastic.remote_workers import RemoteMemory, RemoteWorkers
from shardwise.launch.elastic.succession import unpickled
from shardwise.launch.hosts.agreement import has_half
from shardwise.launch.places.ssh import SshPlan
from shardwise.system.launcher_address import LauncherAddress


@dataclass
class HostsState:
    """All that a launcher which takes over needs to know, but for secrets."""

    plan: SshPlan
    run_id: str
    number: int = 0
    """How many launchers the job has had before this one."""
    version: int = -1
    num_labels: int = 0
    """How many hosts have had a label."""
    roster: tuple[str, ...] = ()
    """The labels of the hosts that the last version was decided with."""
    time: float = 0.0
    """When it was, by the job's clock."""
    workers: RemoteMemory = field(default_factory=RemoteMemory)
    agent: Mapping[str, Any] | None = None
    """What the main loop remembers; `None` before it has begun."""
    restarts: Any = None
    """The budget of restarts of all ranks."""

    def as_text(self) -> str:
        bare = replace(self, plan=replace(self.plan, environment={}))
        return base64.b85encode(zlib.compress(pickle.dumps(bare), 1)).decode()

    @classmethod
    def of_text(cls, text: str) -> HostsState:
        """Raises `LaunchError`."""
        try:
            state = unpickled(zlib.decompress(base64.b85decode(text)))
        except (ValueError, zlib.error) as error:
            raise LaunchError(f"What this host has of the last launcher cannot be read: {error}.") from error
        if not isinstance(state, cls):
            raise LaunchError(
                f"What this host has of the last launcher is a {type(state).__name__}, and not the state of a job on "
                f"hosts. Start the job again: its script resumes from its last checkpoint."
            )
        return state


class Hosts(Protocol):
    """The hosts of a job, as `RemoteWorkers` has them."""

    @property
    def connected(self) -> list[RemoteHost]: ...

    parting: list[RemoteHost]

    def part(self) -> None: ...

    def hear(self) -> None: ...

    def memory(self) -> RemoteMemory: ...


class CutOffError(LaunchError):
    """A launcher reaches less than half of its hosts."""


class Mirror:
    """A `Successor` that is any of the hosts."""

    def __init__(self, state: HostsState, hosts: Hosts, seconds: float, clock: Callable[[], float] = time.monotonic):
        """`seconds`: how long hosts look for a launcher."""
        self.state = state
        self._hosts, self._seconds, self._clock = hosts, seconds, clock

    def now(self) -> float:
        """The job's clock."""
        return self._clock()

    def tend(self) -> None:
        """Nothing to do: every host is ready to take over."""

    def keep(self, agent: Mapping[str, Any] | None) -> None:
        """Wait until half of the hosts have what the main loop remembers. Raises `CutOffError` if so many do not answer
        that the others may have another launcher."""
        state, before = self.state, self.state.roster
        for host in self._hosts.connected:
            if not host.label:
                host.label, state.num_labels = f"host-{state.num_labels}", state.num_labels + 1
        state.agent, state.version, state.time = agent, state.version + 1, self._clock()
        there = {host.label: host for host in self._hosts.connected}
        state.roster = tuple(there)
        state.workers = self._hosts.memory()
        text, seats = state.as_text(), [[label, *host.seat] for label, host in there.items()]
        told = there | {host.label: host for host in self._hosts.parting}
        for label, host in told.items():
            assert host.connection is not None
            host.connection.send(
                "keep",
                label=label,
                number=state.number,
                version=state.version,
                hosts=seats,
                before=list(before),
                seconds=self._seconds,
                state=text,
            )
        while not has_half(self._who_has_it(told), state.roster, before):
            connected = (*self._hosts.connected, *self._hosts.parting)
            may_answer = {label for label, host in told.items() if host in connected}
            if not has_half(may_answer | self._who_has_it(told), state.roster, before):
                raise CutOffError(_cut_off(len(may_answer), max(len(before), len(there))))
            self._hosts.hear()
        self._hosts.part()

    def _who_has_it(self, hosts: Mapping[str, RemoteHost]) -> set[str]:
        return {label for label, host in hosts.items() if host.label == label and host.num_kept >= self.state.version}


def let_others_take_over(plan: SshPlan, workers: RemoteWorkers, context: Context) -> None:
    """From here on, let hosts keep what this launcher, the job's first, decides. Raises as `Mirror.keep` does."""
    mirror = Mirror(HostsState(plan, context.run_id), workers, context.elastic.launcher_timeout_seconds)
    workers.introduce(LauncherAddress(0, context.address, context.port), context.token)
    mirror.keep(None)
    context.succession = mirror


def _cut_off(num_left: int, num_hosts: int) -> str:
    return (
        f"This launcher reaches {num_left} of {num_hosts} hosts. The others may follow another one by now, so it ends, "
        f"with the ranks that it reaches. If it was the others that were lost, start the job again: it continues from "
        f"its last checkpoint. (Without --launcher-timeout no other launcher takes over, and this one would go on.)"
    )
