"""What to run, and on how many ranks: plain data that can be checked and printed before it runs."""

from __future__ import annotations

import importlib.machinery
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError, LaunchError, nearest
from shardwise.launch.environment import Attempt, rank_environment
from shardwise.launch.port import ADDRESS


@dataclass(frozen=True)
class Job:
    """One script (or module) with its arguments, to run on `nproc` ranks of this machine."""

    command: tuple[str, ...]
    nproc: int
    is_module: bool = False
    port: int | None = None
    max_restarts: int = 0
    threads: int | None = None
    log_dir: Path | None = None
    grace_seconds: float = 10.0
    run_by: tuple[str, ...] = ()
    """A module that runs the script, and its own arguments before it; none runs it as it is."""

    def check(self) -> None:
        """Refuse what cannot run, with a sentence."""
        _at_least(1, self.nproc, "--nproc", "a job needs at least one rank")
        _at_least(0, self.max_restarts, "--max-restarts", "0 means that a failure is final")
        _at_least(0, self.grace_seconds, "--timeout", "it is the seconds that ranks get to end")
        if self.threads is not None:
            _at_least(1, self.threads, "--threads", "a rank needs at least one thread")
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}; a port is a number from 1 to 65535.")
        if self.log_dir is not None and self.log_dir.exists() and not self.log_dir.is_dir():
            raise ConfigError(f"--log-dir {str(self.log_dir)!r} is a file; give a directory.")
        if self.is_module:
            _check_module(self.command[0])
        else:
            _check_script(self.command[0])

    def rank_command(self) -> list[str]:
        """The command line of every rank."""
        module = ["-m"] if self.is_module else []
        over = ["-m", *self.run_by] if self.run_by else []
        return [sys.executable, "-m", "shardwise.launch.worker", *over, *module, *self.command]


def describe(job: Job, on_cpu: bool) -> str:
    """The command of the ranks and the environment of each, as text: what a dry run prints."""
    first = Attempt(ADDRESS, job.port or "<a free port>", max_restarts=job.max_restarts)
    environments = [
        rank_environment(rank, job.nproc, first, os.environ, threads=job.threads, on_cpu=on_cpu, error_file="<a file>")
        for rank in range(job.nproc)
    ]
    common = set.intersection(*(set(environment.items()) for environment in environments))
    lines = [f"{job.nproc} times: {shlex.join(job.rank_command())}", "every rank:"]
    lines += [f"  {name}={value}" for name, value in sorted(common)]
    for rank, environment in enumerate(environments):
        lines.append(f"rank {rank}:")
        lines += [f"  {name}={value}" for name, value in sorted(set(environment.items()) - common)]
    return "\n".join(lines)


def _at_least(least: int, value: float, option: str, reason: str) -> None:
    if value < least:
        raise ConfigError(f"{option} is {value}: {reason}. Give {least} or more.")


def _check_script(script: str) -> None:
    path = Path(script)
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
    # only the top package: to look deeper would import it, here, in the launcher
    top = module.partition(".")[0]
    if top in sys.builtin_module_names:
        return
    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) is None:
        raise LaunchError(
            f"There is no module {module!r}: {top!r} is neither in this directory nor installed. "
            "To run a file, leave -m out."
        )
