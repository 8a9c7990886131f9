"""The agent on a host of an elastic job: starts and ends single processes, and reports an end within milliseconds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import IO, Any

from shardwise.errors import LaunchError
from shardwise.launch.cores import bindings
from shardwise.launch.echo import Echo
from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.elastic.job_notes import FolderNotes, OomKills
from shardwise.launch.environment import Attempt, RankPosition, environment_at
from shardwise.launch.hosts import facts
from shardwise.launch.hosts.agreement import Agreement, Kept, Presence, Waits
from shardwise.launch.hosts.host_messages import BEATS, Inbox, Message, Outbox, outcome_as_message
from shardwise.launch.hosts.sealed_lines import SealedSink
from shardwise.launch.hosts.server import HostServer, Order
from shardwise.launch.log_folder import Folder
from shardwise.launch.port import listen
from shardwise.launch.ranks import Ranks
from shardwise.launch.signals import SignalLog
from shardwise.system.job_folder import ENDING
from shardwise.system.launcher_address import LauncherAddress
from shardwise.system.machine import is_stopped

HEIR = "shardwise.launch.elastic.heir"
"""The module of a launcher that takes over on a host."""
LAUNCHER_LOG = "shardwise-launcher.log"


class MemberAgent(HostServer):
    """One host's processes, by number. They use the folder of `images`, which is removed when this process ends."""

    def __init__(self, inbox: Inbox, outbox: Outbox, folder: Folder, images: Images, signals: SignalLog) -> None:
        super().__init__(inbox, outbox, folder, signals)
        self._images = images
        self._notes = FolderNotes(images.folder)
        self._ranks = Ranks()
        self._order: dict[int, int] = {}
        """By number: the index among the processes started here."""
        self._lives: dict[int, int] = {}
        """By number: the pidfd of each living process."""
        self._echoes: dict[int, Echo] = {}
        self._oom_kills = OomKills()
        self._beat_at = 0.0
        self._ended: dict[int, Message] = {}
        """By number: how a process has ended, as it was reported."""
        self._kept: Kept | None = None
        self._listener: socket.socket | None = None
        """Where other hosts connect if the launcher is lost."""
        self._token, self._environment = "", dict[str, str]()
        """What the launcher does not repeat over connections that others can read."""
        self._presence: Presence | None = None
        self._launcher: subprocess.Popen[bytes] | None = None

    # -- orders -----------------------------------------------------------------------------------------

    def _orders(self) -> dict[str, Order]:
        return super()._orders() | {
            "members": self._do_members,
            "begin": self._do_begin,
            "member": self._do_member,
            "end_member": self._do_end_member,
            "end_job": self._do_end_job,
            "end": self._do_end,
            "kill": self._do_kill,
            "is_stopped": self._do_is_stopped,
            "trust": self._do_trust,
            "launcher": self._do_launcher,
            "keep": self._do_keep,
            "adopt": self._do_adopt,
            "leave_out": self._do_leave_out,
            "record": self._do_record,
        }

    def _do_members(self, silence_seconds: float) -> None:
        """Report the addresses of this host and of the launcher, as ssh knows them."""
        self.silence_seconds, self._beat_at = max(1.0, silence_seconds), 0.0
        problem = "" if hasattr(os, "pidfd_open") else "its system has no pidfd, which tells when a process ends"
        launcher = os.environ.get("SSH_CONNECTION", "").split()
        address = facts.ssh_address(os.environ)
        if address and self._listener is None:
            self._listener = listen(None, address)
        port = 0 if self._listener is None else int(self._listener.getsockname()[1])
        self._say(kind="members", address=address, launcher=launcher[0] if address else "", problem=problem, port=port)

    def _do_begin(self) -> None:
        """Begin a new attempt, with an empty folder."""
        self._images.clear()

    def _do_member(
        self, number: int, rank: int, size: int, local: int, attempt: Message, environment: dict[str, str]
    ) -> None:
        files = self._files(int(attempt["number"]), number)
        inherited = os.environ | self._network(2) | self._environment | environment
        self._ended.pop(number, None)
        kind = facts.kind_by_files()
        position = RankPosition(rank, size, local_rank=local, local_size=max(self._job.nproc, local + 1))
        own = environment_at(
            position,
            self._attempt(attempt),
            inherited,
            threads=self._job.threads,
            on_cpu=kind is None,
            error_file=str(files.error),
        )
        own |= self._binding(local, inherited, kind) | {"SHARDWISE_LAUNCHER_PID": str(os.getpid())}
        if self._images.folder is not None:
            own["SHARDWISE_IMAGES"] = str(self._images.folder)
        if self._token:  # torch's store prints twenty lines of C++ frames, many times, when the launcher dies
            own["TORCH_CPP_LOG_LEVEL"] = inherited.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        pid = self._ranks.start(self._job.rank_command(), inherited | own, files)
        self._order[number] = len(self._order)
        self._lives[number] = os.pidfd_open(pid)
        self._echoes[number] = Echo([files], lambda _: self._screens(number))

    def _attempt(self, message: Message) -> Attempt:
        attempt = Attempt(**message)
        return attempt if attempt.token else replace(attempt, token=self._token)

    def _do_end_member(self, number: int) -> None:
        if number in self._lives:
            self._ranks.kill_one(self._order[number])

    def _do_end_job(self) -> None:
        if self._images.folder is not None:
            (self._images.folder / ENDING).touch()

    def _do_end(self, number: int) -> None:
        self._ranks.send(signal.Signals(number))

    def _do_kill(self) -> None:
        for number in self._lives:
            self._ranks.kill_one(self._order[number])

    def _do_is_stopped(self, number: int, pid: int) -> None:
        self._say(kind="stopped", number=number, is_so=number in self._lives and is_stopped(pid))

    # -- launchers that follow each other ---------------------------------------------------------------

    def _do_trust(self, token: str, environment: dict[str, str]) -> None:
        self._token, self._environment = token, environment
        if self._listener is not None:
            self._presence = Presence(self._listener, token)

    def _do_launcher(self, number: int, host: str, port: int) -> None:
        """Tell the ranks where the launcher's store is."""
        if self._images.folder is not None:
            LauncherAddress(number, host, port).write(self._images.folder)

    def _do_keep(self, **kept: Any) -> None:
        self._kept = Kept.of(kept)
        self._say(kind="kept", version=self._kept.version)

    def _do_adopt(self, members: list[int]) -> None:
        """To a launcher that knows these processes: which there are, and how those that have ended did. Of others it
        has not heard, and has their slots for free."""
        for number in self._lives.keys() - set(members):
            os.close(self._lives.pop(number))
            self._ranks.kill_one(self._order[number])
            self._echoes.pop(number).close()
        ended = [number for number in members if number in self._ended]
        self._say(kind="adopted", members=[*self._lives, *ended], time=time.time())
        for number in ended:
            self._say(kind="member", **self._ended[number])
        self._has_reported_signal = False

    def _follow_the_next(self) -> bool:
        """See [Note: agreement] in `agreement.py`. Ranks train meanwhile."""
        if self._kept is None or not self._kept.hosts:
            return False
        agreement = Agreement(
            *(self._kept, self._token, self._listener, self._start_launcher),
            waits=Waits(self.silence_seconds),
            is_ended=lambda: bool(self._signals.received),
        )
        following = agreement.next_launcher()
        if following is None:
            return False
        self._inbox = following.inbox
        self._outbox.send_by(SealedSink(following.sealed.connection, following.sealed.to_launcher))
        for order in following.orders:
            self._answer(order)
        return True

    def _start_launcher(self, kept: Kept, listener: socket.socket) -> Callable[[], bool]:
        """Returns whether it has ended, when asked. What it prints is in a file in the directory in which the ranks
        run, if that can be written to."""
        self._presence = None  # whoever connects from now on is looking for that launcher
        try:
            log: IO[bytes] | int = open(LAUNCHER_LOG, "ab")  # noqa: SIM115 closed below
        except OSError:
            log = subprocess.DEVNULL
        command = [sys.executable, "-m", HEIR, str(listener.fileno())]
        launcher = self._launcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[listener.fileno()], start_new_session=True
        )
        if not isinstance(log, int):
            log.close()
        assert launcher.stdin is not None
        given = {"kept": asdict(kept), "token": self._token, "environment": self._environment}
        with suppress(OSError), launcher.stdin as stream:  # it has ended
            stream.write(json.dumps(given).encode())
        return lambda: launcher.poll() is not None

    def _do_leave_out(self, steps: list[int]) -> None:
        self._notes.leave_out(steps)
        self._say(kind="left_out")

    def _do_record(self, line: dict[str, Any]) -> None:
        self._notes.record(line)

    # -- what happens -----------------------------------------------------------------------------------

    def _descriptors(self) -> Sequence[int]:
        return list(self._lives.values())

    def _watch(self) -> None:
        self._ranks.any_alive()
        for number in list(self._lives):
            if self._ranks.code(self._order[number]) is not None:
                self._report_end(number)
            elif self._ranks.lingers(self._order[number], self._job.grace_seconds):
                self._ranks.kill_one(self._order[number])
        now = time.monotonic()
        if self._presence is not None:
            self._presence.look(self._inbox.heard, now)
        if now > self._beat_at:
            self._beat_at = now + self.silence_seconds / BEATS
            self._say(kind="beat")

    def _report_end(self, number: int) -> None:
        os.close(self._lives.pop(number))
        self._ranks.kill_one(self._order[number])  # its children
        outcome = replace(self._ranks.outcome(self._order[number]), rank=number)
        ran_out = self._oom_kills.has_risen()
        message = outcome_as_message(outcome)
        self._ended[number] = {"outcome": message, "ran_out": ran_out, "skips": self._notes.skips()}
        self._say(kind="member", **self._ended[number])
        self._echoes.pop(number).close()

    def _end_alone(self) -> None:
        """See [Note: lost connections] in `server.py`."""
        self._ranks.kill()
        self._ranks.kill_children()
        for echo in self._echoes.values():
            echo.close()

    def _binding(self, local: int, inherited: dict[str, str], kind: str | None) -> dict[str, str]:
        if local >= self._job.nproc:
            if self._job.bind != "none":
                raise LaunchError(
                    f"its slot {local} was added later, and --bind {self._job.bind} has no cores left for it"
                )
            return bindings(local + 1, inherited, kind=self._shown(kind))[local]
        return self._bindings(kind, inherited)[local]
