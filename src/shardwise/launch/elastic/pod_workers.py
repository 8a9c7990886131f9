"""The processes of an elastic job in pods, which open the connection themselves and have names that are used once."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace

from shardwise.launch.elastic.remote_host import RemoteHost
from shardwise.launch.elastic.remote_workers import RemoteMemory, RemoteWorkers
from shardwise.launch.elastic.slots import Slot
from shardwise.launch.elastic.workers import Event
from shardwise.launch.environment import Attempt
from shardwise.launch.hosts.connection import Arrivals, Connection
from shardwise.launch.hosts.host_messages import Message
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.hosts.pod_server import PodCarrier, PodServer
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.pods import PodsPlan
from shardwise.launch.places.ssh import SshPlan

BACK_SECONDS = 6.0
"""Pods that look for their launcher find it within this time: they try it again after 5 s at the latest."""


@dataclass(eq=False)
class Pod(RemoteHost):
    """One pod, for one connection. When that is lost, this pod or another one connects again."""

    carrier: PodCarrier | None = None
    returning: Message = field(default_factory=dict)
    """What it has told of the last launcher, whose ranks it has; empty if it has none."""

    def connect(self, plan: SshPlan, arrivals: Arrivals, now: float) -> None:
        assert self.carrier is not None
        self.ask(Connection(self.share, ["pod"], arrivals, self.numbers, self.carrier), plan, now)

    def why_given_up(self, now: float, silence_seconds: float, python: str) -> str:
        if self.state == "asked":
            return "it connected, but did not answer" if now > self.deadline else ""
        return super().why_given_up(now, silence_seconds, python)

    def why_closed(self, python: str) -> str:
        del python
        return "it has closed the connection"


class PodWorkers(RemoteWorkers):
    """`Workers` in the pods that connect to a server."""

    def __init__(
        self, plan: PodsPlan, server: PodServer, store: tuple[str, int], logs: Logs, say: Callable[[str], None]
    ) -> None:
        self._pod_messages: Arrivals = queue.Queue(256)
        super().__init__(plan, [], self._pod_messages, store, logs, say)
        self._server = server
        self.has_begun = False
        """Whether it is known what the ranks of this job are."""

    def events(self) -> list[Event]:
        self._accept()
        return super().events()

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        super().start(number, slot, replace(attempt, token=""), settings)  # pods have it, and others could read it here

    def returning(self) -> dict[str, Pod]:
        """Pods that have ranks of the last launcher and can go on with them, by label."""
        pods = (host for host in self._hosts.values() if isinstance(host, Pod) and host.state == "ready")
        return {pod.returning["label"]: pod for pod in pods if pod.returning}

    def adopt(self, memory: RemoteMemory, hosts: Mapping[str, RemoteHost]) -> None:
        """As for other hosts. All others that are there are to connect again, since they were not counted."""
        self._events.clear()
        for name, host in list(self._hosts.items()):
            if host not in hosts.values() and host.connection is not None:
                host.connection.cut()
                del self._hosts[name]
        for label, host in hosts.items():
            host.label = label
        super().adopt(memory, hosts)

    def _absent(self, share: Share, label: str) -> Pod:
        return Pod(share, label=label, is_listed=False)

    def _introduce(self, host: RemoteHost) -> None:
        """Pods have the token, and get the environment with each rank."""
        if self._address is not None and host.connection is not None:
            host.connection.send("launcher", **asdict(self._address))

    def _take(self, host: RemoteHost, message: Message) -> None:
        if message["kind"] != "returning" or not isinstance(host, Pod):
            super()._take(host, message)
        elif not self.has_begun:
            host.returning = message
        elif host.connection is not None:
            host.connection.send("bye")  # its ranks were counted as lost; it connects again
            self._lose(host, "it has come back too late")

    def end_pods(self, status: int) -> None:
        """Tell all pods the job's exit status, so that they end too; also those that connect late."""
        self._server.close_with({"do": "over", "status": status})
        num_told = self._send_all("over", status=status)
        if num_told < len(self._plan.shares):
            time.sleep(BACK_SECONDS)

    def _accept(self) -> None:
        for name in self._server.names():
            if (known := self._hosts.get(name)) is None:
                share = Share(Host(name), 0, self._plan.slots_per_host or 1)
                self._hosts[name] = Pod(share, is_listed=False, carrier=self._server.take(name))
            elif known.connection is not None:  # it connects again, so the old connection is of no use
                known.connection.cut()
