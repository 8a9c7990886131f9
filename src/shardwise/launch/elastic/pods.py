"""The processes of an elastic job in pods, which open the connection themselves and have names that are used once."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardwise.launch.elastic.remote import RemoteHost, RemoteWorkers
from shardwise.launch.elastic.slots import Slot
from shardwise.launch.elastic.workers import Event
from shardwise.launch.environment import Attempt
from shardwise.launch.hosts.connection import Arrivals, Connection
from shardwise.launch.hosts.door import Caller, Door
from shardwise.launch.hosts.logs import Logs
from shardwise.launch.places.hosts import Host, Share
from shardwise.launch.places.pods import PodsPlan
from shardwise.launch.places.ssh import SshPlan

_LATE_SECONDS = 6.0
"""For so long, a job that is over tells pods so that look for it again."""


@dataclass(eq=False)
class Pod(RemoteHost):
    """One pod, for one connection: when that is lost, it calls again, or another pod does."""

    caller: Caller | None = None

    def connect(self, plan: SshPlan, arrivals: Arrivals, now: float) -> None:
        assert self.caller is not None
        self.ask(Connection(self.share, ["pod"], arrivals, self.numbers, self.caller), plan, now)

    def why_given_up(self, now: float, silence_seconds: float, python: str) -> str:
        if self.state == "asked":
            return "it called and did not come to an answer" if now > self.deadline else ""
        return super().why_given_up(now, silence_seconds, python)

    def why_closed(self, python: str) -> str:
        del python
        return "it has closed the connection"


class PodWorkers(RemoteWorkers):
    """`Workers` in the pods that call at a door."""

    def __init__(
        self, plan: PodsPlan, door: Door, meeting: tuple[str, int], logs: Logs, say: Callable[[str], None]
    ) -> None:
        self._calls: Arrivals = queue.Queue(256)
        super().__init__(plan, [], self._calls, meeting, logs, say)
        self._door = door

    def events(self) -> list[Event]:
        self._let_in()
        return super().events()

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        super().start(number, slot, replace(attempt, token=""), settings)  # pods have it, and others could read it

    def end_well_or_not(self, status: int) -> None:
        """Tell all pods with which status the job has ended, so that they end too. Those that come late are told."""
        self._door.send_away({"do": "over", "status": status})
        num_told = self._send_all("over", status=status)
        if num_told < len(self._plan.shares):
            time.sleep(_LATE_SECONDS)

    def _let_in(self) -> None:
        for name in self._door.names():
            if (known := self._hosts.get(name)) is None:
                share = Share(Host(name), 0, self._plan.slots_per_host or 1)
                self._hosts[name] = Pod(share, is_listed=False, caller=self._door.take(name))
            elif known.connection is not None:  # it calls again, so the other connection is of no use
                known.connection.cut()
