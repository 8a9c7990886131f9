"""What makes the launcher of an elastic job replaceable: what it writes down, and the process that takes over.

[Note: what is written down] A launcher writes down its decisions before they have an effect that others see: before it
publishes an announcement, and when it has started a process. What it merely has heard is not written down: members send
it again (`comm/members/channels.py`), and ends of processes are found again. So a launcher may be killed between any
two lines.

The file is a pickle, because it holds the objects that decide, whose fields are nobody else's business. It is in the
job's own folder, which only its user can enter, and it is read by classes of this package alone.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from shardwise.errors import LaunchError
from shardwise.launch.elastic.workers import WorkersMemory
from shardwise.launch.job import Job
from shardwise.system.job_folder import LAUNCHER_STATE
from shardwise.system.safe_files import replaced

_PAUSE_SECONDS = 1.0
"""At least this long after the start of a standby process that has ended, another one is started."""
_SOON_SECONDS, _MAX_SOON = 10.0, 5
_UNREADABLE = (
    OSError,
    pickle.UnpicklingError,
    AttributeError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    EOFError,
)
"""What reading the file of another version can raise."""
_DISMISSED, _DISMISSED_SECONDS = b"!", 5.0


@dataclass
class JobState:
    """All that a launcher which takes over needs to know."""

    job: Job
    on_cpu: bool
    bound: list[dict[str, str]]
    run_id: str
    token: str
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    directory: str = field(default_factory=os.getcwd)
    number: int = 0
    """How many launchers the job has had before this one."""
    pid: int = field(default_factory=os.getpid)
    workers: WorkersMemory = field(default_factory=WorkersMemory)
    agent: Mapping[str, Any] | None = None
    """What the main loop remembers; `None` before it has begun."""
    restarts: Any = None
    """The budget of restarts of all ranks."""

    def write(self, folder: Path) -> None:
        """Replace what was written before, as a whole."""
        with replaced(folder / LAUNCHER_STATE) as draft:
            draft.write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, folder: Path) -> JobState:
        """Raises `LaunchError` for a folder without a job's state, or that others can write to."""
        try:
            seen = folder.stat()
            if seen.st_uid != os.geteuid() or seen.st_mode & 0o022:
                raise LaunchError(
                    f"{str(folder)!r} belongs to somebody else, or others can write to it, so what it says of a job is "
                    f"not trusted. Take over a job as the user who started it."
                )
            state = _Reader(io.BytesIO((folder / LAUNCHER_STATE).read_bytes())).load()
            if not isinstance(state, cls):
                raise pickle.UnpicklingError("it is something else")
        except _UNREADABLE as error:
            raise LaunchError(
                f"{str(folder)!r} has no elastic job that this version can take over: {error}. Name a folder "
                f"that `shardwise launch --elastic` has reported."
            ) from error
        return state


class _Reader(pickle.Unpickler):
    """Makes only objects of this package, and containers."""

    _OTHERS: ClassVar = {
        "collections": ("deque",),
        "pathlib": ("PosixPath",),
        "pathlib._local": ("PosixPath",),
        "signal": ("Signals",),
        "builtins": ("set", "frozenset"),
    }

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module.split(".")[0] == "shardwise" else None
        if found is None and name in self._OTHERS.get(module, ()):
            found = super().find_class(module, name)
        if not isinstance(found, type):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def unpickled(content: bytes) -> object:
    """An object of this package. Raises `LaunchError`."""
    try:
        return _Reader(io.BytesIO(content)).load()
    except _UNREADABLE as error:
        raise LaunchError(f"What a launcher has written down cannot be read by this version: {error}.") from error


class WrittenDown(Protocol):
    """What is written down for it."""

    restarts: Any
    """The budget of restarts of all ranks; `None` as long as there was none."""


class Successor(Protocol):
    """Who takes over from a launcher that is killed."""

    @property
    def state(self) -> WrittenDown: ...

    def keep(self, agent: Mapping[str, Any] | None) -> None:
        """Write down what the main loop remembers, if it has begun. See [Note: what is written down]."""
        ...

    def tend(self) -> None:
        """See that there is one."""
        ...


class Succession:
    """The end of a launcher's work that the next one begins with; without a `folder` there is none."""

    def __init__(
        self,
        folder: Path | None,
        state: JobState,
        memory: Callable[[], WorkersMemory],
        say: Callable[[str], None],
        start: Callable[[Path], subprocess.Popen[bytes]] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory` returns what is to be known about the processes, `start` starts a standby process;
        without it, only a person takes over."""
        self.state = state
        self._folder, self._memory, self._say = folder, memory, say
        self._start, self._clock = start, clock
        self._standby: subprocess.Popen[bytes] | None = None
        self._starts: collections.deque[float] = collections.deque(maxlen=_MAX_SOON)
        self._has_given_up = folder is None or start is None

    def keep(self, agent: Mapping[str, Any] | None) -> None:
        self.state.agent = agent
        if self._folder is not None:
            self.state.workers = self._memory()
            self.state.write(self._folder)

    def tend(self) -> None:
        """Start a standby process, if there is none."""
        if self._has_given_up or (self._standby is not None and self._standby.poll() is None):
            return
        now, starts = self._clock(), self._starts
        if starts and now - starts[-1] < _PAUSE_SECONDS:
            return
        if len(starts) == _MAX_SOON and now - starts[0] < _SOON_SECONDS:
            self._has_given_up = True
            self._say(
                f"{_MAX_SOON} processes ended that were to take over if this launcher is killed. The job goes on "
                f"without: if this launcher is killed, its ranks end."
            )
            return
        starts.append(now)
        assert self._folder is not None
        assert self._start is not None
        with contextlib.suppress(OSError):  # no process can be started at the moment
            self._standby = self._start(self._folder)

    def dismiss(self) -> None:
        """The job is over: nobody is to take over."""
        self._has_given_up = True
        if self._standby is None:
            return
        assert self._standby.stdin is not None
        with contextlib.suppress(OSError), self._standby.stdin as stream:  # it has ended
            stream.write(_DISMISSED)
        try:
            self._standby.wait(_DISMISSED_SECONDS)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._standby.kill()
            self._standby.wait()
        self._standby = None


def start_standby(module: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that waits to take over, by the module that does so."""
    # a session of its own: what the terminal sends is for the launcher, and what kills its group spares this one
    command = [sys.executable, "-m", module, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
