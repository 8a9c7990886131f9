"""Hosts that a command line of `horovodrun` names, as words for `shardwise launch`, which reaches them by ssh."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import LaunchError

BY_SSH = ("--ssh-port", "--ssh-identity-file", "--network-interfaces")
"""Options that have a meaning between hosts, and none on one."""
_HERE = ("localhost", "127.0.0.1", "::1")
_SPACED = re.compile(r"\s+slots\s*=\s*")
_OF_ONE_HOST = re.compile(
    r"HOME|USER|LOGNAME|MAIL|SHELL|SHLVL|PWD|OLDPWD|HOSTNAME|TERM|DISPLAY|TMPDIR|PYTHONPATH|_"
    r"|SHARDWISE_(LAUNCHER_PID|CORES)|(SSH|XDG|DBUS|LC|BASH_FUNC)_.*"
)


@dataclass(frozen=True)
class NamedHosts:
    """Names and slots, in the order in which they are filled with ranks."""

    slots: dict[str, int]

    @property
    def num_slots(self) -> int:
        return sum(self.slots.values())

    @property
    def is_elsewhere(self) -> bool:
        """Whether any of them is another host than this one."""
        return any(host not in (*_HERE, socket.gethostname()) for host in self.slots)

    def filled(self, nproc: int) -> NamedHosts:
        """The hosts that have any of `nproc` ranks, and how many: the first are full, as Horovod fills them."""
        left, found = nproc, {}
        for host, slots in self.slots.items():
            if left > 0:
                found[host] = min(left, slots)
                left -= slots
        return NamedHosts(found)


def named_hosts(hosts: str | None, hostfile: Path | None) -> NamedHosts | None:
    """What `-H a:4,b:4` or the lines `a slots=4` of a file name; `None` if there is neither.

    Raises `LaunchError` for both, for a file that cannot be read, and for what is no host with its slots.
    """
    if hosts is not None and hostfile is not None:
        raise LaunchError("--hosts and --hostfile both say where. Give one of them.")
    words: list[str] = []
    if hosts is not None:
        words = hosts.split(",")
    elif hostfile is not None:
        try:
            lines = [line.partition("#")[0].strip() for line in hostfile.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(f"--hostfile cannot be read: {error}.") from error
        words = [_SPACED.sub(":", line) for line in lines if line]
    if not words:
        return None
    slots: dict[str, int] = {}
    for word in words:
        host, _, count = word.strip().rpartition(":") if ":" in word else (word.strip(), "", "1")
        if not count.isdigit() or int(count) < 1:
            raise LaunchError(f"{word} does not say how many ranks: write {host}:2.")
        slots[host] = slots.get(host, 0) + int(count)
    return NamedHosts(slots)


def words_for_ssh(hosts: NamedHosts, args: Any) -> list[str]:
    """`shardwise launch --where ssh` for a rank on every slot of `hosts`, with the options of `BY_SSH` in `args`."""
    for host in hosts.slots:
        if host in _HERE and len(hosts.slots) > 1:
            raise LaunchError(f"{host} is one of several hosts: write the name by which the others reach it.")
    named = ",".join(f"{host}:{count}" for host, count in hosts.slots.items())
    return ["--where", "ssh", "--hosts", named, *ssh_options(args)]


def ssh_options(args: Any) -> list[str]:
    """What the options of `BY_SSH` in `args` say to `shardwise launch`."""
    words = ["--ssh-port", args.ssh_port] if args.ssh_port else []
    words += ["--identity", args.ssh_identity_file] if args.ssh_identity_file else []
    if args.network_interfaces:
        words += [f"--env={name}_SOCKET_IFNAME={args.network_interfaces}" for name in ("GLOO", "NCCL")]
    return words


def words_for_environment(names: Iterable[str] | None = None) -> list[str]:
    """Ranks on other hosts get the variables of this process, as Horovod's do, but for those about this host."""
    known = sorted(os.environ if names is None else names)
    given = [name for name in known if not _OF_ONE_HOST.fullmatch(name) and re.fullmatch(r"[A-Za-z_]\w*", name)]
    return [f"--env={name}" for name in given]
