"""Translates the hosts on a command line of `horovodrun` to arguments of `shardwise launch --where ssh`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError
from shardwise.system.safe_files import read_config_text

SSH_OPTIONS = ("--ssh-port", "--ssh-identity-file", "--network-interfaces")
"""Options that have an effect only with other hosts."""
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SLOTS = re.compile(r"(?<!\s)\s++slots\s*+=\s*+")
_COUNT = re.compile(r"[1-9][0-9]{0,8}")
_HOST_VARIABLES = re.compile(
    r"HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|TERM|DISPLAY|TMPDIR|PYTHONPATH|_"
    r"|SHARDWISE_(LAUNCHER_PID|CORES)|(SSH|XDG|DBUS|LC|BASH_FUNC)_.*"
)


@dataclass(frozen=True)
class Hosts:
    """Hosts and their numbers of slots, in the order in which they are filled with ranks."""

    slots: dict[str, int]

    @property
    def num_slots(self) -> int:
        return sum(self.slots.values())

    @property
    def has_remote(self) -> bool:
        """Whether any of them is not this host."""
        return any(host not in (*_LOCAL_NAMES, socket.gethostname()) for host in self.slots)

    def filled(self, nproc: int) -> Hosts:
        """The hosts and slots that `nproc` ranks use. The first hosts are full, as in Horovod."""
        remaining, used = nproc, {}
        for host, slots in self.slots.items():
            if remaining > 0:
                used[host] = min(remaining, slots)
                remaining -= slots
        return Hosts(used)


def parse_hosts(hosts: str | None, hostfile: Path | None) -> Hosts | None:
    """Parse `-H a:4,b:4`, or a file with lines such as `a slots=4`; `None` if there is neither.

    Raises `LaunchError` if both are given, if the file cannot be read, and for text that is not a host with slots.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile exclude each other. Pass one of them.")
    items: list[str] = []
    if hosts is not None:
        items = hosts.split(",")
    elif hostfile is not None:
        try:
            lines = [line.partition("#")[0].strip() for line in read_config_text(hostfile).splitlines()]
        except OSError as error:
            raise LaunchError(f"--hostfile cannot be read: {error}.") from error
        items = [_SLOTS.sub(":", line) for line in lines if line]
    if not items:
        return None
    slots: dict[str, int] = {}
    for item in items:
        host, _, count = item.strip().rpartition(":") if ":" in item else (item.strip(), "", "1")
        if not _COUNT.fullmatch(count):
            raise LaunchError(f"{item:.100} has no valid number of slots. Write {host:.100}:2.")
        slots[host] = slots.get(host, 0) + int(count)
    return Hosts(slots)


def ssh_arguments(hosts: Hosts, args: Any) -> list[str]:
    """Arguments of `shardwise launch` for a rank on every slot of `hosts`."""
    for host in hosts.slots:
        if host in _LOCAL_NAMES and len(hosts.slots) > 1:
            raise LaunchError(f"Other hosts cannot reach {host}. Write this host's name or address.")
    host_list = ",".join(f"{host}:{count}" for host, count in hosts.slots.items())
    return ["--where", "ssh", "--hosts", host_list, *ssh_options(args)]


def ssh_options(args: Any) -> list[str]:
    """The values of `SSH_OPTIONS`, as options of `shardwise launch`."""
    arguments = ["--ssh-port", args.ssh_port] if args.ssh_port else []
    arguments += ["--identity", args.ssh_identity_file] if args.ssh_identity_file else []
    if args.network_interfaces:
        arguments += [f"--env={name}_SOCKET_IFNAME={args.network_interfaces}" for name in ("GLOO", "NCCL")]
    return arguments


def environment_arguments(names: Iterable[str] | None = None) -> list[str]:
    """Arguments that pass this process's variables to ranks on other hosts, except those that describe this host."""
    names = sorted(os.environ if names is None else names)
    passed = [name for name in names if not _HOST_VARIABLES.fullmatch(name) and re.fullmatch(r"[A-Za-z_]\w*", name)]
    return [f"--env={name}" for name in passed]
