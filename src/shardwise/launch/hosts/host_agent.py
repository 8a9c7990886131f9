"""The agent on a host: starts its ranks, reports how they end, and ends them together."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import LaunchError
from shardwise.launch.echo import Echo
from shardwise.launch.environment import Attempt, RankPosition, environment_at
from shardwise.launch.hosts import facts
from shardwise.launch.hosts.host_messages import Inbox, Message, Outbox, outcome_as_message
from shardwise.launch.hosts.server import HostServer, Order
from shardwise.launch.log_folder import Folder
from shardwise.launch.port import listen
from shardwise.launch.ranks import Ranks
from shardwise.launch.signals import SignalLog

if TYPE_CHECKING:
    from shardwise.launch.store import LauncherStore


class HostAgent(HostServer):
    """One host's part of a job. `run` returns when the job is over or the connection is lost."""

    def __init__(self, inbox: Inbox, outbox: Outbox, folder: Folder, signals: SignalLog) -> None:
        super().__init__(inbox, outbox, folder, signals)
        self._ranks: Ranks | None = None
        self._echo = Echo([])
        self._first_rank = 0
        self._deadline: float | None = None
        self._num_killed = 0
        self._reported: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._store: LauncherStore | None = None

    def _orders(self) -> dict[str, Order]:
        return super()._orders() | {
            "listen": self._do_listen,
            "prepare": self._do_prepare,
            "start": self._do_start,
            "end": self._do_end,
            "kill": self._do_kill,
            "cancel_rendezvous": self._do_cancel_rendezvous,
            "last_status": self._do_last_status,
        }

    def _do_listen(self, address: str, port: int | None) -> None:
        """Open the store's port, only at the address by which other hosts reach this one."""
        here = address or facts.ssh_address(os.environ)
        if not here:
            raise LaunchError("its address is not known, since SSH_CONNECTION is not set; give it with --master-addr")
        self._listener = listen(port, here)
        self._say(kind="listening", address=here, port=self._listener.getsockname()[1])

    def _do_prepare(self, run_id: str, token: str) -> None:
        """On the first host: create the store, or empty it for the next attempt."""
        from shardwise.launch.store import LauncherStore  # imports torch, which agents of other hosts do not need

        if self._store is None and self._listener is not None:
            self._store = LauncherStore(self._listener, run_id, token)
        if self._store is not None:
            self._store.next_rendezvous()
        self._say(kind="prepared")

    def _do_start(self, first_rank: int, position: Message, attempt: Message, environment: dict[str, str]) -> None:
        self._ranks, self._first_rank, self._deadline, self._num_killed = Ranks(), first_rank, None, 0
        self._reported = {"failed": False, "ended": []}
        inherited = os.environ | self._network(int(position["num_hosts"])) | environment
        kind = facts.kind_by_files()
        bound = self._bindings(kind, inherited)
        files = [self._files(int(attempt["number"]), local) for local in range(self._job.nproc)]
        for local, paths in enumerate(files):
            rank = RankPosition(first_rank + local, local_rank=local, local_size=self._job.nproc, **position)
            own = environment_at(
                rank,
                Attempt(**attempt),
                inherited,
                threads=self._job.threads,
                on_cpu=kind is None,
                error_file=str(paths.error),
            )
            whole = inherited | own | bound[local] | {"SHARDWISE_LAUNCHER_PID": str(os.getpid())}
            self._ranks.start(self._job.rank_command(), whole, paths)
        self._echo = Echo(files, lambda local: self._screens(first_rank + local))

    def _do_end(self, number: int) -> None:
        if self._ranks is not None and self._deadline is None:
            self._ranks.send(signal.Signals(number))
            self._deadline = time.monotonic() + self._job.grace_seconds

    def _do_kill(self) -> None:
        self._deadline = time.monotonic()

    def _do_cancel_rendezvous(self, attempt: int, ended: list[int], living: list[int]) -> None:
        if self._store is not None:
            self._store.cancel_rendezvous(attempt, ended, living)

    def _do_last_status(self, attempt: int, ranks: list[int]) -> None:
        last = {} if self._store is None else {rank: self._store.last_status(rank, attempt) for rank in ranks}
        self._say(kind="last_status", statuses=[[rank, status] for rank, status in last.items()])

    def _watch(self) -> None:
        """Poll the ranks, and report changes."""
        if self._ranks is None:
            return
        any_alive = self._ranks.any_alive()
        ended = [self._first_rank + local for local in self._ranks.ended_and_living()[0]]
        if ended != self._reported["ended"]:
            self._reported["ended"] = ended
            self._say(kind="ended", ranks=ended)
        if not self._reported["failed"] and self._ranks.any_failed(self._job.grace_seconds):
            self._reported["failed"] = True
            self._say(kind="failed")
        if any_alive and self._deadline is not None and time.monotonic() > self._deadline:
            self._num_killed = self._ranks.kill()
            any_alive = False
        if not any_alive:
            self._report_end(self._ranks)

    def _report_end(self, ranks: Ranks) -> None:
        ranks.kill_children()
        self._echo.close()
        ended = [replace(outcome, rank=self._first_rank + outcome.rank) for outcome in ranks.outcomes()]
        self._say(kind="over", outcomes=[outcome_as_message(one) for one in ended], killed=self._num_killed)
        self._ranks = None

    def _end_alone(self) -> None:
        """See [Note: lost connections] in `server.py`."""
        if self._ranks is not None:
            self._ranks.send(signal.SIGTERM)
            self._ranks.wait(self._job.grace_seconds, hurry=lambda: False)
            self._ranks.kill()
            self._ranks.kill_children()
            self._echo.close()
