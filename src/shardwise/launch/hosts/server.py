"""The agent's message loop on a host: carries out the launcher's orders until the job is over or the launcher is lost.

[Note: lost connections] The launcher is lost when the connection is closed, or when no message has arrived for a
minute, since a failing network may close nothing. If no other one follows, the ranks then get SIGTERM, and after the
grace period SIGKILL. If this process itself is killed, the kernel kills the ranks.

Ranks of an elastic job are killed at once, and after a shorter silence: the others continue without them, and anything
these ranks still wrote could only do damage.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.launch.cores import bindings
from shardwise.launch.hosts import facts
from shardwise.launch.hosts.host_messages import MAX_TEXT_CHARS, Inbox, Message, Outbox
from shardwise.launch.job import Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.ranks import POLL_SECONDS, RankFiles
from shardwise.launch.signals import SignalLog

SILENCE_SECONDS = 60.0
Order = Callable[..., None]


class HostServer:
    """Carries out the orders common to all jobs. Subclasses add `_orders`, `_watch` and `_end_alone`."""

    silence_seconds = SILENCE_SECONDS

    def __init__(self, inbox: Inbox, outbox: Outbox, folder: Folder, signals: SignalLog) -> None:
        self._inbox, self._outbox, self._folder, self._signals = inbox, outbox, folder, signals
        self._job = Job(("",), 1)
        self._address = ""
        self._is_done = False
        self._has_reported_signal = False

    def run(self) -> None:
        """Carry out orders until the job is over."""
        while not self._is_done:
            for message in self._inbox.take(POLL_SECONDS, self._descriptors()):
                self._answer(message)
            is_lost = self._inbox.closed or time.monotonic() - self._inbox.heard > self.silence_seconds
            if is_lost and not self._follow_the_next():
                self._end_alone()
                return
            if self._signals.received and not self._has_reported_signal:
                self._has_reported_signal = True
                self._say(kind="signal", number=int(signal.SIGTERM))
            self._watch()

    def _descriptors(self) -> Sequence[int]:
        """Descriptors that become readable when there is something to do."""
        return ()

    def _watch(self) -> None:
        """Poll the ranks, and report changes."""

    def _follow_the_next(self) -> bool:
        """Connect to the launcher that takes over; whether there is one."""
        return False

    def _end_alone(self) -> None:
        """End the ranks after losing the launcher: see [Note: lost connections]."""

    def _answer(self, message: Message) -> None:
        do = self._orders().get(str(message.pop("do", "")))
        if do is None:
            return
        try:
            do(**message)
        except (ShardwiseError, OSError) as error:
            self._say(kind="problem", text=str(error).rstrip("."))

    def _orders(self) -> dict[str, Order]:
        """What is done at each order, by its name in messages. Its parameters are the message's other entries."""
        return {
            "alive": self._do_alive,
            "look": self._do_look,
            "reach": self._do_reach,
            "bye": self._do_bye,
        }

    def _do_alive(self) -> None:
        """Nothing to do: the arrival of the message is noted elsewhere."""

    def _do_look(self, directory: str, job: Message) -> None:
        self._job = Job(**job | {"command": tuple(job["command"]), "run_by": tuple(job["run_by"])})
        self._outbox.send(facts.look(directory, self._job))

    def _do_reach(self, address: str, port: int) -> None:
        problem, self._address = facts.reach(address, port)
        self._say(kind="reached", problem=problem)

    def _do_bye(self) -> None:
        self._is_done = True

    def _network(self, num_hosts: int) -> dict[str, str]:
        """The interface for gloo: the one used by ssh, or by this host to reach the store. By default gloo takes the
        one of this host's name, which may be loopback."""
        address = facts.ssh_address(os.environ) or self._address
        interface = facts.interface_of(address) if num_hosts > 1 else ""
        return {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}

    def _bindings(self, kind: str | None, inherited: dict[str, str]) -> list[dict[str, str]]:
        """For each rank that this host begins with, the variables for its cores and its device, which is of a `kind`.
        `inherited` is the environment of the ranks."""
        seats = self._job.seats(kind, inherited)
        shown = self._shown(kind)
        return bindings(self._job.nproc, inherited, bound=seats, threads=self._job.threads, kind=shown)

    def _shown(self, kind: str | None) -> str | None:
        """The kind of the one device that each rank sees; `None` if it sees all."""
        return kind or "cuda" if self._job.shows_one_device else None

    def _files(self, attempt: int, number: int) -> RankFiles:
        return RankFiles.with_output(self._folder.files(attempt, number).error)

    def _screens(self, rank: int) -> tuple[_Screen, _Screen]:
        return _Screen(self._outbox, rank, is_error=False), _Screen(self._outbox, rank, is_error=True)

    def _say(self, **message: Any) -> None:
        self._outbox.send(message)


class _Screen:
    """Sends a rank's output to the launcher."""

    def __init__(self, outbox: Outbox, rank: int, is_error: bool) -> None:
        self._outbox, self._rank, self._is_error = outbox, rank, is_error

    def write(self, block: bytes) -> object:
        text = block.decode(errors="backslashreplace")
        for start in range(0, len(text), MAX_TEXT_CHARS):
            part = text[start : start + MAX_TEXT_CHARS]
            self._outbox.send({"kind": "output", "rank": self._rank, "is_error": self._is_error, "text": part})
        return None

    def flush(self) -> None:
        """Nothing to do: every message is sent at once."""
