"""What to run, and on how many ranks: plain data, checked and printable before anything runs."""

from __future__ import annotations

import importlib.machinery
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.elastic import causes
from shardwise.errors import ConfigError, LaunchError, nearest
from shardwise.launch.autoscale import Policy
from shardwise.launch.cores import BINDINGS, Seat, bindings, seats
from shardwise.launch.environment import Attempt, rank_environment
from shardwise.launch.port import ADDRESS
from shardwise.launch.topology import this_host


@dataclass(frozen=True)
class Elastic:
    """With how many ranks a job may continue, and how many replacements may be started."""

    least: int
    most: int
    retries: int = 3
    retry_seconds: float = 600
    """At most `retries` replacements are started within this time."""
    exclude_seconds: float = 600
    """No process is started for this long on a host with faults of its own."""
    host_timeout_seconds: float = 15
    """A host that sends nothing for this long is lost."""
    launcher_timeout_seconds: float = 60
    """Ranks end after this long without a launcher, or a process that takes over from it; 0, on several hosts: at
    once."""
    autoscale: Policy | None = None
    """How many ranks the job asks for while it runs."""

    @property
    def policy(self) -> causes.Policy:
        """How faults are classified."""
        return causes.Policy(seconds=self.retry_seconds)

    def check(self, nproc: int) -> None:
        """Raise `ConfigError` for bounds that are impossible, or do not include `nproc`."""
        _at_least(1, self.least, "--elastic MIN", "a job needs at least one rank")
        _at_least(0, self.retries, "--retries", "0 means that dead ranks are not replaced")
        if not hasattr(os, "pidfd_open"):
            raise ConfigError("--elastic needs Linux: this system has no pidfd, which tells when a process ends.")
        if self.most < self.least:
            raise ConfigError(f"--elastic {self.least}:{self.most}: MIN is more than MAX. Give MIN:MAX.")
        if not self.least <= nproc <= self.most:
            raise ConfigError(
                f"--nproc {nproc} is not within --elastic {self.least}:{self.most}. The job starts with --nproc ranks, "
                f"and grows back to that number."
            )


@dataclass(frozen=True)
class Job:
    """A script or module with its arguments, to run on `nproc` ranks of this machine."""

    command: tuple[str, ...]
    nproc: int
    is_module: bool = False
    port: int | None = None
    max_restarts: int = 0
    threads: int | None = None
    log_dir: Path | None = None
    grace_seconds: float = 10.0
    run_by: tuple[str, ...] = ()
    """A module that runs the script, with its own arguments; if empty, Python runs the script directly."""
    python: str = field(default_factory=lambda: sys.executable)
    bind: str = "none"
    """To which cores each rank is bound, one of `launch.cores.BINDINGS`."""
    elastic: Elastic | None = None
    """Set if the job continues when ranks die or join."""
    shows_one_device: bool = False
    """Whether each rank sees only one device, rather than all devices of its host."""

    def check(self) -> None:
        """Raise `ConfigError` or `LaunchError` for a job that cannot run here."""
        self.check_numbers()
        self.check_script()

    def check_numbers(self) -> None:
        """Raise `ConfigError` for a job that cannot run anywhere."""
        _at_least(1, self.nproc, "--nproc", "a job needs at least one rank")
        _at_least(0, self.max_restarts, "--max-restarts", "0 means that a failure is final")
        _at_least(0, self.grace_seconds, "--timeout", "it is the number of seconds that ranks get to end")
        if not math.isfinite(self.grace_seconds):
            raise ConfigError(
                f"--timeout is {self.grace_seconds}: it is the number of seconds that ranks get to end. Give a finite "
                f"number."
            )
        if self.threads is not None:
            _at_least(1, self.threads, "--threads", "a rank needs at least one thread")
        if self.bind not in BINDINGS:
            raise ConfigError(f"--bind is {self.bind!r}; give one of {', '.join(BINDINGS)}.")
        if self.elastic is not None:
            self.elastic.check(self.nproc)
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; a port is a number from 1 to 65535.")
        if self.log_dir is not None and self.log_dir.exists() and not self.log_dir.is_dir():
            raise ConfigError(f"--log-dir {str(self.log_dir)!r} is a file; give a directory.")

    def check_script(self) -> None:
        """Raise `LaunchError` for a script or module that does not exist."""
        if self.is_module:
            _check_module(self.command[0])
        else:
            _check_script(self.command[0])

    def rank_command(self) -> list[str]:
        """The command line of every rank."""
        return [self.python, "-m", "shardwise.launch.worker", *self._run()]

    def script_command(self) -> list[str]:
        """The command line of a rank started by another launcher, which reports its errors itself."""
        return [self.python, *self._run()]

    def bindings(self, kind: str | None) -> list[dict[str, str]]:
        """For each rank of this machine, the variables for its cores and its device, which is of a `kind`.

        Raises `ConfigError` if there are too few.
        """
        if self.shows_one_device and kind is None:
            raise ConfigError("--devices one: there is no GPU here. Remove it.")
        shown = kind if self.shows_one_device else None
        bound = self.seats(kind, os.environ)
        return bindings(self.nproc, os.environ, bound=bound, threads=self.threads, kind=shown)

    def seats(self, kind: str | None, inherited: Mapping[str, str]) -> list[Seat]:
        """The cores of each rank of this machine, whose devices are of a `kind`; empty if ranks are not bound.

        `inherited` is the environment of the ranks. Raises `ConfigError` if there are too few cores.
        """
        return [] if self.bind == "none" else seats(this_host(), self.bind, self.nproc, inherited, kind)

    def _run(self) -> list[str]:
        module = ["-m"] if self.is_module else []
        over = ["-m", *self.run_by] if self.run_by else []
        return [*over, *module, *self.command]


def describe(job: Job, on_cpu: bool, bound: list[dict[str, str]], seats: Sequence[Seat] = ()) -> str:
    """Command and environment of the ranks, as a dry run prints them. `bound` is from `Job.bindings`, `seats` from
    `Job.seats`."""
    first = Attempt(ADDRESS, job.port or "<a free port>", max_restarts=job.max_restarts)
    environments = [
        rank_environment(rank, job.nproc, first, os.environ, threads=job.threads, on_cpu=on_cpu, error_file="<a file>")
        | bound[rank]
        for rank in range(job.nproc)
    ]
    common = set.intersection(*(set(environment.items()) for environment in environments))
    ranks = "1 rank runs" if job.nproc == 1 else f"{job.nproc} ranks run"
    lines = [f"{ranks}: {shlex.join(job.rank_command())}", "environment of all ranks:"]
    lines += [f"  {name}={value}" for name, value in sorted(common)]
    for rank, environment in enumerate(environments):
        lines.append(f"environment of rank {rank}:")
        lines += [f"  {name}={value}" for name, value in sorted(set(environment.items()) - common)]
    lines += [f"rank {rank} is bound to {seat}" for rank, seat in enumerate(seats)]
    return "\n".join(lines)


def _at_least(least: int, value: float, option: str, reason: str) -> None:
    if value < least:
        raise ConfigError(f"{option} is {value}: {reason}. Give {least} or more.")


_PLAN = "no Python script. A plan, or a config, is an option before the script: --shardwise, --accelerate-config."
_NO_SCRIPTS = {
    ".ipynb": "a notebook. Ranks run a script, which `jupyter nbconvert --to script` makes of it.",
    **dict.fromkeys((".sh", ".bash"), "a shell script, and ranks run Python. Let it call `shardwise launch` itself."),
    **dict.fromkeys((".yaml", ".yml", ".toml", ".json"), _PLAN),
}
"""What is given in the place of a script, by its suffix. Python would run some notebooks, and do nothing."""


def _check_script(script: str) -> None:
    path = Path(script)
    if path.suffix in _NO_SCRIPTS:
        raise LaunchError(f"{script!r} is {_NO_SCRIPTS[path.suffix]}")
    if path.is_file() or (path / "__main__.py").is_file():
        return
    if path.is_dir():
        raise LaunchError(f"{script!r} is a directory without a __main__.py; name the script in it.")
    if not path.parent.is_dir():
        raise LaunchError(f"There is no script {script!r}: its directory {str(path.parent)!r} does not exist.")
    scripts = [str(path.parent / name) for name in os.listdir(path.parent) if name.endswith(".py")]
    if not scripts:
        here = str(path.parent.resolve())
        raise LaunchError(f"There is no script {script!r}, nor any other Python file in {here!r}.")
    raise LaunchError(f"There is no script {script!r}. {nearest(script, scripts)}")


def _check_module(module: str) -> None:
    # only the top-level package: looking deeper would import it into the launcher
    top = module.partition(".")[0]
    if top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise LaunchError(
            f"There is no module {module!r}: {top!r} is neither in this directory nor installed. "
            "To run a file, leave -m out."
        )
