"""On a host: starts its ranks when told, says what becomes of them, and ends them when nobody is there any more.

[Note: lost connections] Whoever started the job is gone when the connection is closed, or when nothing has come over it
for a minute: a network that fails says nothing. The ranks then get SIGTERM, and after the grace SIGKILL. If this
process itself is killed, the kernel ends the ranks.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch.cores import bindings, numa_nodes
from shardwise.launch.echo import Echo
from shardwise.launch.environment import Attempt, Seat, seat_environment
from shardwise.launch.folder import Folder
from shardwise.launch.hosts import facts
from shardwise.launch.hosts.wire import MAX_TEXT_CHARS, Inbox, Message, Outbox, outcome_as_message
from shardwise.launch.job import Job
from shardwise.launch.port import listen
from shardwise.launch.ranks import POLL_SECONDS, RankFiles, Ranks
from shardwise.launch.signals import SignalLog

if TYPE_CHECKING:
    from shardwise.launch.store import LauncherStore

SILENCE_SECONDS = 60.0


class HostAgent:
    """One host's part of a job. `run` returns when the job is over, or nobody is there to say so."""

    def __init__(self, inbox: Inbox, outbox: Outbox, folder: Folder, signals: SignalLog) -> None:
        self._inbox, self._outbox, self._folder, self._signals = inbox, outbox, folder, signals
        self._ranks: Ranks | None = None
        self._echo = Echo([])
        self._job = Job(("",), 1)
        self._first_rank = 0
        self._deadline: float | None = None
        self._num_killed = 0
        self._told: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._store: LauncherStore | None = None
        self._is_done = False

    def run(self) -> None:
        """Do what is asked until it is enough."""
        while not self._is_done:
            for message in self._inbox.take(POLL_SECONDS):
                self._answer(message)
            if self._inbox.closed or time.monotonic() - self._inbox.heard > SILENCE_SECONDS:
                self._end_alone()
                return
            self._watch()

    def _answer(self, message: Message) -> None:
        answer = getattr(self, f"_do_{message.pop('do', '')}", None)
        if answer is None:
            return
        try:
            answer(**message)
        except (ShardwiseError, OSError) as error:
            self._say(said="problem", text=str(error).rstrip("."))

    def _do_alive(self) -> None:
        """Having heard it is all."""

    def _do_look(self, directory: str, job: Message) -> None:
        self._job = Job(**job | {"command": tuple(job["command"]), "run_by": tuple(job["run_by"])})
        self._outbox.send(facts.look(directory, self._job))

    def _do_listen(self, address: str, port: int | None) -> None:
        """Have the port at which ranks meet, at this host's address that others reach, and at no other."""
        here = address or facts.own_address(os.environ)
        if not here:
            raise LaunchError("ssh does not tell its address (SSH_CONNECTION); give it with --master-addr")
        self._listener = listen(port, here)
        self._say(said="listening", address=here, port=self._listener.getsockname()[1])

    def _do_reach(self, address: str, port: int) -> None:
        self._say(said="reached", problem=facts.reach(address, port))

    def _do_prepare(self, run_id: str, token: str) -> None:
        """The first host keeps the store at which ranks meet; each attempt finds it empty."""
        from shardwise.launch.store import LauncherStore  # torch, which other hosts' agents do without

        if self._store is None and self._listener is not None:
            self._store = LauncherStore(self._listener, run_id, token)
        if self._store is not None:
            self._store.next_rendezvous()
        self._say(said="prepared")

    def _do_start(self, first_rank: int, seat: Message, attempt: Message, environment: dict[str, str]) -> None:
        self._ranks, self._first_rank, self._deadline, self._num_killed = Ranks(), first_rank, None, 0
        self._told = {"failed": False, "ended": []}
        inherited = os.environ | self._network(int(seat["num_hosts"])) | environment
        kind = facts.kind_by_files()
        bound = bindings(
            self._job.nproc,
            inherited,
            nodes=numa_nodes() if self._job.binds_cores else None,
            kind=kind or "cuda" if self._job.shows_one_device else None,
        )
        files = [self._files(int(attempt["number"]), local) for local in range(self._job.nproc)]
        for local, paths in enumerate(files):
            place = Seat(first_rank + local, local_rank=local, local_size=self._job.nproc, **seat)
            own = seat_environment(
                place,
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

    def _do_meeting(self, attempt: int, ended: list[int], living: list[int]) -> None:
        if self._store is not None:
            self._store.cancel_meeting(attempt, ended, living)

    def _do_words(self, attempt: int, ranks: list[int]) -> None:
        told = {} if self._store is None else {rank: self._store.last_words(rank, attempt) for rank in ranks}
        self._say(said="words", words=[[rank, words] for rank, words in told.items()])

    def _do_bye(self) -> None:
        self._is_done = True

    def _watch(self) -> None:
        """Look at the ranks, and say what is new."""
        if self._signals.received and not self._told.get("signal"):
            self._told["signal"] = True
            self._say(said="signal", number=int(signal.SIGTERM))
        if self._ranks is None:
            return
        any_alive = self._ranks.any_alive()
        ended = [self._first_rank + local for local in self._ranks.ended_and_living()[0]]
        if ended != self._told["ended"]:
            self._told["ended"] = ended
            self._say(said="ended", ranks=ended)
        if not self._told["failed"] and self._ranks.any_failed(self._job.grace_seconds):
            self._told["failed"] = True
            self._say(said="failed")
        if any_alive and self._deadline is not None and time.monotonic() > self._deadline:
            self._num_killed = self._ranks.kill()
            any_alive = False
        if not any_alive:
            self._tell_the_end(self._ranks)

    def _tell_the_end(self, ranks: Ranks) -> None:
        ranks.kill_children()
        self._echo.close()
        ended = [replace(outcome, rank=self._first_rank + outcome.rank) for outcome in ranks.outcomes()]
        self._say(said="over", outcomes=[outcome_as_message(one) for one in ended], killed=self._num_killed)
        self._ranks = None

    def _end_alone(self) -> None:
        """See [Note: lost connections]."""
        if self._ranks is not None:
            self._ranks.send(signal.SIGTERM)
            self._ranks.wait(self._job.grace_seconds, hurry=lambda: False)
            self._ranks.kill()
            self._ranks.kill_children()
            self._echo.close()

    def _network(self, num_hosts: int) -> dict[str, str]:
        """Gloo would take the interface of this host's name, which may be loopback: ranks take the one ssh came by."""
        interface = facts.interface_of(facts.own_address(os.environ)) if num_hosts > 1 else ""
        return {"GLOO_SOCKET_IFNAME": interface} if interface and "GLOO_SOCKET_IFNAME" not in os.environ else {}

    def _files(self, attempt: int, local: int) -> RankFiles:
        error = self._folder.files(attempt, local).error
        return RankFiles(error, error.with_name("stdout.log"), error.with_name("stderr.log"))

    def _screens(self, rank: int) -> tuple[_Screen, _Screen]:
        return _Screen(self._outbox, rank, is_error=False), _Screen(self._outbox, rank, is_error=True)

    def _say(self, **message: Any) -> None:
        self._outbox.send(message)


class _Screen:
    """Where a rank's output is shown: at the other end of the connection."""

    def __init__(self, outbox: Outbox, rank: int, is_error: bool) -> None:
        self._outbox, self._rank, self._is_error = outbox, rank, is_error

    def write(self, block: bytes) -> object:
        text = block.decode(errors="backslashreplace")
        for start in range(0, len(text), MAX_TEXT_CHARS):
            part = text[start : start + MAX_TEXT_CHARS]
            self._outbox.send({"said": "output", "rank": self._rank, "is_error": self._is_error, "text": part})
        return None

    def flush(self) -> None:
        """Every message goes at once."""
