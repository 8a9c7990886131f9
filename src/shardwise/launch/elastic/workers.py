"""The interface between an elastic launcher and its processes, wherever they run; and the processes of this host."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardwise.launch.adopted import RankRecord, find_ranks
from shardwise.launch.echo import Echo
from shardwise.launch.elastic.image_folder import Images
from shardwise.launch.elastic.job_notes import FolderNotes, Notes, OomKills
from shardwise.launch.elastic.slots import Slot
from shardwise.launch.environment import Attempt, rank_environment
from shardwise.launch.job import Job
from shardwise.launch.log_folder import Folder
from shardwise.launch.orphans import VARIABLE as ORPHAN_SECONDS
from shardwise.launch.outcome import Outcome
from shardwise.launch.ranks import Ranks, kill_session
from shardwise.system.job_folder import ENDING
from shardwise.system.machine import is_stopped


@dataclass(frozen=True)
class Ended:
    """A process has ended. `ran_out`: since the last end on its host, the kernel there has killed a process, out of
    memory."""

    number: int
    outcome: Outcome
    ran_out: bool = False


@dataclass(frozen=True)
class HostReady:
    """A host answers, and has `num_slots`."""

    host: str
    num_slots: int


@dataclass(frozen=True)
class HostLost:
    """A host is lost, with the processes `numbers`."""

    host: str
    numbers: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class HostLeaves:
    """A host is to be drained, down to `num_slots`."""

    host: str
    why: str
    num_slots: int = 0
    is_urgent: bool = False
    """Whether the host will end soon, even if the job needs it."""


Event = Ended | HostReady | HostLost | HostLeaves


class Workers(Protocol):
    """The processes of a job, by number. Used by one thread."""

    @property
    def living(self) -> Collection[int]: ...

    @property
    def notes(self) -> Notes: ...

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        """Start a process, with `settings` in its environment. Raises `OSError`."""
        ...

    def wait(self, milliseconds: int) -> None:
        """Wait for an event, at most this long."""
        ...

    def events(self) -> list[Event]:
        """The events since the last call."""
        ...

    def outcome(self, number: int) -> Outcome:
        """The outcome of a process that has ended; its `rank` is the process's number."""
        ...

    def is_stopped(self, number: int, pid: int) -> bool:
        """Whether the system has stopped a process, as far as known; `pid` is what the process has reported."""
        ...

    def end_one(self, number: int) -> None:
        """Kill a process and its children."""
        ...

    def end_job(self) -> None:
        """Tell ranks that the whole job ends, so that a SIGTERM is no longer a request to leave alone."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes."""
        ...

    def wait_for_end(self, seconds: float, hurry: Callable[[], bool]) -> None:
        """Wait until all have ended, `seconds` have passed, or `hurry()` is true."""
        ...

    def kill(self) -> int:
        """Kill all living processes, with their children; return their number."""
        ...

    def leave(self, host: str) -> None:
        """Release a host, which has no processes of the job any more."""
        ...

    def begin(self) -> None:
        """Begin a new attempt, without the files of the last one's ranks."""
        ...

    def close(self) -> None:
        """Kill all living processes, and show their last output. May be called twice."""
        ...


@dataclass
class WorkersMemory:
    """What a launcher that takes over needs to know about the processes of this host."""

    records: Sequence[RankRecord] = ()
    """By number."""
    living: frozenset[int] = frozenset()
    """Those whose end the launcher has not acted on."""


class LocalWorkers:
    """The processes of this host; an end is noticed within a millisecond."""

    def __init__(self, job: Job, folder: Folder, images: Images, *, on_cpu: bool, bound: list[dict[str, str]]) -> None:
        self.notes = FolderNotes(images.folder)
        self._job = job
        self._folder = folder
        self._images = images
        self._on_cpu = on_cpu
        self._bound = bound
        self._ranks = Ranks()
        self._oom_kills = OomKills()
        self._poll = select.poll()
        self._lives: dict[int, int] = {}
        """By number: the pidfd of each living process; -1 for one that has ended, and whose end nobody has heard."""
        self._echoes: list[Echo] = []

    @property
    def living(self) -> Collection[int]:
        return self._lives.keys()

    def memory(self) -> WorkersMemory:
        """What a launcher that takes over gets by `adopt`."""
        return WorkersMemory(self._ranks.records(), frozenset(self._lives))

    def adopt(self, memory: WorkersMemory, run_id: str) -> int:
        """Take over the processes of a launcher that was killed. Returns how many of them live.

        Processes that it has started and not written down are killed: their slots are free.
        """
        found = find_ranks(run_id)
        for number in [number for number in found if number >= len(memory.records)]:
            kill_session(found.pop(number))
        self._ranks.adopt(memory.records, found)
        for number in memory.living:
            self._lives[number] = -1
            if number in found:
                self._follow(number, found[number])
                files = self._folder.files_beside(memory.records[number].error_file)
                self._echoes.append(Echo([files], from_end=True))
        return len(memory.living & found.keys())

    def _follow(self, number: int, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._lives[number] = os.pidfd_open(pid)
            self._poll.register(self._lives[number], select.POLLIN)

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        files = self._folder.files(attempt.number, number)
        environment = rank_environment(
            slot.local,
            self._job.nproc,
            attempt,
            os.environ,
            threads=self._job.threads,
            on_cpu=self._on_cpu,
            error_file=str(files.error),
        )
        if self._images.folder is None:
            own = {"SHARDWISE_LAUNCHER_PID": str(os.getpid())}  # nobody could take over
        else:
            assert self._job.elastic is not None
            seconds = f"{self._job.elastic.launcher_timeout_seconds:g}:{self._job.grace_seconds:g}"
            own = {"SHARDWISE_IMAGES": str(self._images.folder), ORPHAN_SECONDS: seconds}
            # torch's store prints twenty lines of C++ frames, several times a second, when the launcher dies
            own["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        whole = os.environ | environment | self._bound[slot.local] | own | settings
        pid = self._ranks.start(self._job.rank_command(), whole, files)
        self._lives[number] = -1
        self._follow(number, pid)
        self._echoes.append(Echo([files]))

    def wait(self, milliseconds: int) -> None:
        self._poll.poll(milliseconds)

    def events(self) -> list[Event]:
        self._ranks.any_alive()
        found: list[Event] = []
        for number in [number for number in self._lives if self._ranks.code(number) is not None]:
            self._forget(number)
            self._ranks.kill_one(number)  # its children
            found.append(Ended(number, self._ranks.outcome(number), self._oom_kills.has_risen()))
        for number in self._lives:
            if self._ranks.lingers(number, self._job.grace_seconds):
                self.end_one(number)
        return found

    def outcome(self, number: int) -> Outcome:
        return self._ranks.outcome(number)

    def is_stopped(self, number: int, pid: int) -> bool:
        return is_stopped(pid) if number in self._lives else False

    def end_one(self, number: int) -> None:
        self._ranks.kill_one(number)

    def end_job(self) -> None:
        if self._images.folder is not None:
            (self._images.folder / ENDING).touch()

    def send(self, number: signal.Signals) -> None:
        self._ranks.send(number)

    def wait_for_end(self, seconds: float, hurry: Callable[[], bool]) -> None:
        self._ranks.wait(seconds, hurry)

    def kill(self) -> int:
        number = self._ranks.kill()
        self._ranks.kill_children()
        return number

    def leave(self, host: str) -> None:
        """Nothing to do: the host is this machine."""

    def begin(self) -> None:
        self._images.clear()

    def close(self) -> None:
        self._ranks.kill()
        for number in list(self._lives):
            self._forget(number)
        for echo in self._echoes:
            echo.close()
        self._echoes.clear()

    def _forget(self, number: int) -> None:
        descriptor = self._lives.pop(number)
        if descriptor >= 0:
            self._poll.unregister(descriptor)
            os.close(descriptor)
