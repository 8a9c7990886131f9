"""The agent on a host of an elastic job: starts and ends single processes, and reports an end within milliseconds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.cores import bindings
from shardwise.launch.echo import Echo
from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.elastic.job_notes import FolderNotes, OomKills
from shardwise.launch.environment import Attempt, RankPosition, environment_at
from shardwise.launch.hosts import facts
from shardwise.launch.hosts.host_messages import Inbox, Message, Outbox, outcome_as_message
from shardwise.launch.hosts.server import HostServer
from shardwise.launch.log_folder import Folder
from shardwise.launch.ranks import RankFiles, Ranks
from shardwise.launch.signals import SignalLog
from shardwise.system.job_folder import ENDING
from shardwise.system.machine import is_stopped

BEATS = 5
"""Messages that each side sends within the silence after which the other side considers it lost."""


class MemberAgent(HostServer):
    """One host's processes, by number. They use the folder of `images`, which is removed when this process ends."""

    def __init__(self, inbox: Inbox, outbox: Outbox, folder: Folder, images: Images, signals: SignalLog) -> None:
        super().__init__(inbox, outbox, signals)
        self._folder, self._images = folder, images
        self._notes = FolderNotes(images.folder)
        self._ranks = Ranks()
        self._order: dict[int, int] = {}
        """By number: the index among the processes started here."""
        self._lives: dict[int, int] = {}
        """By number: the pidfd of each living process."""
        self._echoes: dict[int, Echo] = {}
        self._oom_kills = OomKills()
        self._beat_at = 0.0

    # -- orders -----------------------------------------------------------------------------------------

    def _do_members(self, silence_seconds: float) -> None:
        """Report the addresses of this host and of the launcher, as ssh knows them."""
        self.silence_seconds, self._beat_at = max(1.0, silence_seconds), 0.0
        problem = "" if hasattr(os, "pidfd_open") else "its system has no pidfd, which tells when a process ends"
        launcher = os.environ.get("SSH_CONNECTION", "").split()
        address = facts.own_address(os.environ)
        self._say(kind="members", address=address, launcher=launcher[0] if address else "", problem=problem)

    def _do_begin(self) -> None:
        """Begin a new attempt, with an empty folder."""
        self._images.clear()

    def _do_member(
        self, number: int, rank: int, size: int, local: int, attempt: Message, environment: dict[str, str]
    ) -> None:
        files = self._files(int(attempt["number"]), number)
        inherited = os.environ | self._network(2) | environment
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
        pid = self._ranks.start(self._job.rank_command(), inherited | own, files)
        self._order[number] = len(self._order)
        self._lives[number] = os.pidfd_open(pid)
        self._echoes[number] = Echo([files], lambda _: self._screens(number))

    def _attempt(self, message: Message) -> Attempt:
        return Attempt(**message)

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
        if now > self._beat_at:
            self._beat_at = now + self.silence_seconds / BEATS
            self._say(kind="beat")

    def _report_end(self, number: int) -> None:
        os.close(self._lives.pop(number))
        self._ranks.kill_one(self._order[number])  # its children
        outcome = replace(self._ranks.outcome(self._order[number]), rank=number)
        ran_out = self._oom_kills.has_risen()
        message = outcome_as_message(outcome)
        self._say(kind="member", outcome=message, ran_out=ran_out, skips=self._notes.skips())
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
            return bindings(local + 1, inherited, kind=kind or "cuda" if self._job.shows_one_device else None)[local]
        return bindings(
            self._job.nproc,
            inherited,
            bound=self._job.seats(kind, inherited),
            threads=self._job.threads,
            kind=kind or "cuda" if self._job.shows_one_device else None,
        )[local]

    def _files(self, attempt: int, number: int) -> RankFiles:
        error = self._folder.files(attempt, number).error
        return RankFiles(error, error.with_name("stdout.log"), error.with_name("stderr.log"))
