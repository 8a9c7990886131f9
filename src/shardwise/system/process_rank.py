"""Which rank a process is, from the environment variables of its launcher: a table of launchers, read by pure
functions.

[Note: launchers within launchers] Variables are inherited. `torchrun` under `srun` or `mpirun` numbers its own ranks,
and sets TORCHELASTIC_RUN_ID: it wins. In a Slurm allocation, the `mpirun` of Open MPI and Hydra starts one daemon per
host by `srun`, whose number each rank inherits: so MPI's own variables win over Slurm's. A shell in an allocation has
Slurm's variables too, but only processes started by `srun` have a SLURM_STEP_ID.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher: for each fact those that may have it, the best one first."""

    name: str
    starter: str
    """The command that starts it."""
    rank: str
    size: tuple[str, ...]
    local_rank: str = ""
    local_size: str = ""
    mark: str = ""
    """A variable that must be set as well; without it the others mean something else."""
    is_mpi: bool = False


TORCHRUN = Launcher("torchrun", "torchrun", "RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OPEN_MPI = Launcher(
    "Open MPI",
    "mpirun",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    is_mpi=True,
)
_MVAPICH = Launcher(
    "MVAPICH",
    "mpirun_rsh",
    "MV2_COMM_WORLD_RANK",
    ("MV2_COMM_WORLD_SIZE",),
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    is_mpi=True,
)
_HYDRA = Launcher(  # MPICH's launcher, and Intel MPI's, which is derived from it
    "Hydra (MPICH, Intel MPI)",
    "mpiexec",
    "PMI_RANK",
    ("PMI_SIZE",),
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    mark="MPI_LOCALRANKID",
    is_mpi=True,
)
_SLURM = Launcher(
    "Slurm",
    "srun",
    "SLURM_PROCID",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "SLURM_LOCALID",
    mark="SLURM_STEP_ID",
)
_PMI = Launcher("PMI", "mpiexec", "PMI_RANK", ("PMI_SIZE",), is_mpi=True)
_PMIX = Launcher("PMIx", "prun", "PMIX_RANK", (), is_mpi=True)
LAUNCHERS = (TORCHRUN, _OPEN_MPI, _MVAPICH, _HYDRA, _SLURM, _PMI, _PMIX)
"""The first launcher whose variables are set counts."""


@dataclass(frozen=True)
class ProcessRank:
    """The rank of a process among those that were started with it."""

    rank: int = 0
    size: int | None = 1
    """`None` if only MPI itself knows."""
    local_rank: int = 0
    local_size: int = 0
    """Ranks of this host; 0 if the environment does not say."""
    launcher: Launcher | None = None
    """`None` for a process that was not started as one of several."""

    @property
    def is_mpi(self) -> bool:
        return self.launcher is not None and self.launcher.is_mpi

    def in_words(self) -> str:
        """`"OMPI_COMM_WORLD_RANK=0 of OMPI_COMM_WORLD_SIZE=4"`, for errors."""
        if self.launcher is None:
            return "a process of its own"
        size = f" of {self.launcher.size[0]}={self.size}" if self.launcher.size else ""
        return f"{self.launcher.rank}={self.rank}{size}"


def process_rank_of(env: Mapping[str, str]) -> ProcessRank:
    """The rank of this process. Raises `ConfigError` for an invalid or contradictory environment."""
    found = [launcher for launcher in LAUNCHERS if _has_started(launcher, env)]
    if not found:
        _check_alone(env)
        return ProcessRank(local_rank=number_in(env, "LOCAL_RANK", 0), local_size=number_in(env, "LOCAL_WORLD_SIZE", 0))
    process = _read(found[0], env)
    if process.launcher is TORCHRUN and ("TORCHELASTIC_RUN_ID" in env or process.size == 1):
        return process
    others = [_read(launcher, env) for launcher in found[1:] if launcher.is_mpi and not _is_same(launcher, found[0])]
    for other in others:
        _compare(process, other)
    return process


def left_over(env: Mapping[str, str], process: ProcessRank) -> str:
    """What may be wrong if other ranks do not come, as a sentence; `""` if nothing is known.

    RANK and WORLD_SIZE that were left over in the shell of an `mpirun` are right for one of its ranks, which waits for
    others, while these find a contradiction and end.
    """
    if process.launcher is not TORCHRUN or "TORCHELASTIC_RUN_ID" in env:
        return ""
    for launcher in LAUNCHERS[1:]:
        if launcher.is_mpi and launcher is not _PMIX and _has_started(launcher, env):
            return (
                f" {process.in_words()} is set beside the variables of {launcher.starter} ({launcher.name}): if it was "
                f"left over in the shell, unset RANK and WORLD_SIZE."
            )
    return ""


def attempt_of(env: Mapping[str, str]) -> str:
    """The number of the attempt of a job to which this process belongs: keys of a store and seals carry it, so that no
    rank believes what a dead attempt wrote."""
    return env.get("TORCHELASTIC_RESTART_COUNT", "0")


def launcher_keeps_store(env: Mapping[str, str]) -> bool:
    """Whether the store in which ranks meet is the launcher's, and outlives any of them; otherwise rank 0 keeps it."""
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def address_of(env: Mapping[str, str], process: ProcessRank) -> tuple[str, int]:
    """Host and port at which ranks meet unless MPI provides them: MASTER_ADDR and MASTER_PORT, or one of Slurm's hosts.

    All ranks of a Slurm step compute the same, and two steps or jobs rarely do.
    """
    if process.launcher is not _SLURM:
        return env.get("MASTER_ADDR") or "127.0.0.1", port_in(env, 29500)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST", "")
    job, step = number_in(env, "SLURM_JOB_ID", 0), number_in(env, "SLURM_STEP_ID", 0)
    port = _FIRST_PORT + (job * 37 + step) % _NUM_PORTS
    return env.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1", port_in(env, port)


def first_host(nodes: str) -> str:
    """The first host of a Slurm host list: `"gpu[007-009,12],login"` begins with `"gpu007"`."""
    before, bracket, rest = re.split(r",(?![^\[]*\])", nodes)[0].partition("[")
    if not bracket:
        return before
    ranges, _, after = rest.partition("]")
    return before + re.split(r"[-,]", ranges)[0] + (first_host(f"x{after}")[1:] if after else "")


def port_in(env: Mapping[str, str], default: int) -> int:
    """The port that MASTER_PORT says. Raises `ConfigError` for what is none."""
    port = number_in(env, "MASTER_PORT", default)
    if not 0 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port. Set a number from 1 to 65535, the same on all ranks.")
    return port


def number_in(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError as error:
        raise ConfigError(
            f"{name}={env[name]!r} is not a number. Start the ranks with `shardwise launch`, which sets it."
        ) from error


def _has_started(launcher: Launcher, env: Mapping[str, str]) -> bool:
    if launcher is TORCHRUN:
        return "RANK" in env or "WORLD_SIZE" in env
    return launcher.rank in env and (not launcher.mark or launcher.mark in env)


def _read(launcher: Launcher, env: Mapping[str, str]) -> ProcessRank:
    size_name = next((name for name in launcher.size if name in env), "")
    if launcher.size and not size_name and launcher is not TORCHRUN:
        raise ConfigError(
            f"{launcher.rank}={env[launcher.rank]} is set, as {launcher.starter} of {launcher.name} does, but "
            f"{launcher.size[0]} is not. Unset it, or start the ranks with {launcher.starter}."
        )
    if launcher is TORCHRUN:
        _check_both(env)
    rank = number_in(env, launcher.rank, 0)
    size = number_in(env, size_name or "WORLD_SIZE", 1) if launcher.size else None
    if rank < 0 or (size is not None and rank >= size):
        raise ConfigError(
            f"{launcher.rank}={rank} is not within {size_name or 'WORLD_SIZE'}={size}; ranks count from 0."
        )
    local_rank = number_in(env, launcher.local_rank, 0) if launcher.local_rank else 0
    local_size = number_in(env, launcher.local_size, 0) if launcher.local_size else 0
    if launcher is _SLURM:
        local_size = _tasks_of_node(env)
    return ProcessRank(rank, size, local_rank, local_size, launcher)


def _check_both(env: Mapping[str, str]) -> None:
    """Raise if one of RANK and WORLD_SIZE is there without the other, unless the process is to be alone: with RANK
    alone it would train alone, and with WORLD_SIZE alone every process would be rank 0."""
    counting = next((one for one in LAUNCHERS[1:] if one.is_mpi and _has_started(one, env)), None)
    cure = ""
    if counting is not None:
        cure = f"Unset it: {counting.starter} ({counting.name}) has started this process, and numbers the ranks itself."
    if "WORLD_SIZE" not in env:
        cure = cure or (
            "Set it to the number of ranks (1: this process is alone), or start the ranks with `shardwise launch` or "
            "torchrun, which set both."
        )
        raise ConfigError(f"RANK={env['RANK']} is set, but WORLD_SIZE is not. {cure}")
    if "RANK" not in env and number_in(env, "WORLD_SIZE", 1) > 1:
        cure = cure or (
            "Start the ranks with `shardwise launch` or torchrun, which set both, or set WORLD_SIZE=1 if this process "
            "is to be alone."
        )
        raise ConfigError(
            f"WORLD_SIZE={env['WORLD_SIZE']} says that there are several ranks, but nothing says which of them this "
            f"process is (RANK is not set). {cure}"
        )


def _tasks_of_node(env: Mapping[str, str]) -> int:
    """Ranks of this host from `SLURM_STEP_TASKS_PER_NODE`: `"4(x2),1"` are 4 on two hosts and 1 on a third; 0 if
    unset."""
    nodes: list[int] = []
    for part in filter(None, env.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return 0
        nodes += [int(match[1])] * int(match[2] or 1)
    node = number_in(env, "SLURM_NODEID", 0)
    return nodes[node] if node < len(nodes) else 0


def _is_same(launcher: Launcher, counting: Launcher) -> bool:
    """Whether one launcher is a part of the other, or starts its daemons, so that there is nothing to compare."""
    if launcher is _PMIX:
        return True
    return launcher is _PMI and counting in (_HYDRA, _SLURM)


def _compare(process: ProcessRank, other: ProcessRank) -> None:
    """Raise if two launchers, neither of which is known to run within the other, number the process differently."""
    if (process.rank, process.size) == (other.rank, other.size):
        return
    assert process.launcher is not None
    assert other.launcher is not None
    raise ConfigError(
        f"This process is two different ranks: {process.in_words()} by {process.launcher.starter}'s variables, and "
        f"{other.in_words()} by those of {other.launcher.starter} ({other.launcher.name}). Unset those that were left "
        f"over, or set them alike."
    )


def _check_alone(env: Mapping[str, str]) -> None:
    """A process without a rank is a world by itself; raise if it was clearly started as one of several."""
    for launcher in LAUNCHERS:
        for name in launcher.size if launcher is not TORCHRUN else ():
            if not (env.get(name, "").isdigit() and int(env[name]) > 1):
                continue
            raise ConfigError(
                f"{name}={env[name]} says that {launcher.starter} starts several ranks, but nothing says which of them "
                f"this process is ({launcher.mark or launcher.rank} is not set), so it would train alone. Start it "
                f"with {launcher.starter}, or set WORLD_SIZE=1 if it is to be alone."
            )
