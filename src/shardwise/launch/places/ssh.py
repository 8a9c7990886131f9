"""Ranks on hosts that `ssh` reaches: one connection for each host, at whose other end `launch/hosts/` starts the ranks.

The system's own `ssh` is used, with the keys, names and jumps of its configuration. It never asks: a key that needs a
password is refused. What is secret goes through the connection, not on a command line.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.launch.job import Job
from shardwise.launch.places.hosts import Share

ALIVE_SECONDS = 5
LEFT_OUT = ("--filter=:- .gitignore", "--exclude=.git", "--exclude=.venv*", "--exclude=__pycache__")
"""What is not copied, as rsync takes it. It understands most of what .gitignore files contain, in every folder."""
MEMBERS = "members"
"""The argument of the process on a host if the job is elastic."""
_LOST_AFTER = 3
"""So many messages without an answer, one every `ALIVE_SECONDS`, and ssh takes the connection for lost."""


@dataclass(frozen=True)
class SshSettings:
    """How hosts are reached, and what is there."""

    directory: str
    """Where ranks run, the same path on each host."""
    port: int | None = None
    identity: Path | None = None
    connect_seconds: int = 10
    options: tuple[str, ...] = ()
    """More of ssh's own: `-J`, `gateway`."""
    address: str = ""
    """Of the first host, as the others reach it; `""` is where ssh reached it."""
    copies: bool = False
    """Whether this directory is copied to `directory` on each host, by rsync, before anything starts."""
    python_path: str = ""


@dataclass(frozen=True)
class SshPlan:
    """What would run where."""

    job: Job
    shares: tuple[Share, ...]
    settings: SshSettings
    environment: Mapping[str, str]
    slots_per_host: int | None = None
    """Of hosts that come to an elastic job, if the list of hosts does not say."""

    @property
    def num_ranks(self) -> int:
        return self.shares[-1].ranks.stop

    def check(self) -> None:
        """Raises `ConfigError` for what cannot be."""
        settings = self.settings
        self.job.check_numbers()
        if not os.path.isabs(settings.directory):
            raise ConfigError(f"--chdir {settings.directory!r}: give an absolute path, since ranks are elsewhere.")
        if settings.port is not None and not 1 <= settings.port <= 65535:
            raise ConfigError(f"--ssh-port is {settings.port}; a port is a number from 1 to 65535.")
        if settings.identity is not None and not settings.identity.is_file():
            raise ConfigError(f"--identity {str(settings.identity)!r}: there is no such file.")

    def connection(self, share: Share) -> list[str]:
        """The command that opens the connection to a host."""
        variables = ["env", f"PYTHONPATH={self.settings.python_path}"] if self.settings.python_path else []
        elastic = [MEMBERS] if self.job.elastic is not None else []
        there = [*variables, self.job.python, "-m", "shardwise.launch.hosts", *elastic]
        return [*self._ssh(), share.host.target, f"exec {shlex.join(there)}"]

    def copy(self, share: Share) -> list[str]:
        """The command that brings this directory to a host, but for what git ignores; what is only there stays."""
        name = f"[{share.host.name}]" if ":" in share.host.name else share.host.name
        target = f"{share.host.user}@{name}" if share.host.user else name
        place = f"{target}:{self.settings.directory.rstrip('/')}/"
        return ["rsync", "--archive", "--compress", *LEFT_OUT, "-e", shlex.join(self._ssh()), "./", place]

    def text(self) -> str:
        """What a dry run prints. Values of variables are not shown: there may be secrets among them."""
        elastic = self.job.elastic
        many = f"{elastic.least} to {elastic.most} of " if elastic is not None else ""
        lines = [f"{many}{self.num_ranks} ranks on {len(self.shares)} hosts, in {self.settings.directory}"]
        name = self.shares[0].host.name if elastic is None else "this machine"
        address = self.settings.address or f"the address of {name} in the ssh connection"
        lines.append(f"rendezvous: {address}, port {self.job.port or '<a free one>'}")
        if self.environment:
            lines.append(f"with the variables {', '.join(self.environment)}")
        for share in self.shares:
            lines.append(f"{share.in_words()}:")
            lines += [f"  {shlex.join(self.copy(share))}"] if self.settings.copies else []
            lines.append(f"  {shlex.join(self.connection(share))}")
        lines.append(f"every rank: {shlex.join(self.job.rank_command())}")
        return "\n".join(lines)

    def _ssh(self) -> list[str]:
        settings = self.settings
        options = {
            "BatchMode": "yes",
            "ControlMaster": "no",
            "ControlPath": "none",
            "ConnectTimeout": str(settings.connect_seconds),
            "ServerAliveInterval": str(ALIVE_SECONDS),
            "ServerAliveCountMax": str(_LOST_AFTER),
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        words += ["-p", str(settings.port)] if settings.port else []
        words += ["-i", str(settings.identity), "-o", "IdentitiesOnly=yes"] if settings.identity else []
        return ["ssh", "-T", *words, *settings.options]


def plan_ssh(job: Job, shares: Sequence[Share], settings: SshSettings, environment: Mapping[str, str]) -> SshPlan:
    """What would run where. Raises `ConfigError`."""
    plan = SshPlan(job, tuple(shares), settings, environment)
    plan.check()
    return plan
