"""Facts about a host, for the launcher before it starts anything, and for `shardwise doctor`. Does not import torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from shardwise.errors import ShardwiseError
from shardwise.launch.hosts.host_messages import Message
from shardwise.launch.job import Job
from shardwise.version import __version__

COMPARED = ("torch", "numpy", "safetensors")
"""Packages besides shardwise that must have the same version on all hosts."""
MISSING = "missing"
_DEVICE_FILES = {"/dev/nvidiactl": "cuda", "/dev/kfd": "cuda", "/dev/accel/accel0": "hpu", "/dev/davinci0": "npu"}
_REACH_SECONDS = 5


def look(directory: str, job: Job) -> Message:
    """Enter `directory`; return versions, the time, and why `job` cannot run here (`""` if it can)."""
    found = versions()
    return {
        "kind": "facts",
        "python": found["python"],
        "shardwise": found["shardwise"],
        "torch": "" if found["torch"] == MISSING else found["torch"],
        "time": time.time(),
        "problem": _obstacle(directory, job),
    }


def versions() -> dict[str, str]:
    """Versions of Python, shardwise and the packages in `COMPARED`; `missing` for one that is not installed."""
    found = {"python": platform.python_version(), "shardwise": __version__}
    for package in COMPARED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = MISSING
    return found


def kind_by_files() -> str | None:
    """The kind of accelerator whose driver is installed, by torch's name; None if no known one is."""
    return next((kind for path, kind in _DEVICE_FILES.items() if os.path.exists(path)), None)


def ssh_address(env: Mapping[str, str]) -> str:
    """The address of this host to which ssh connected; `""` if ssh did not start this process."""
    words = env.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


@dataclass(frozen=True)
class Interface:
    """A network interface with one of its addresses; `megabits` is 0 if the driver does not report it."""

    name: str
    address: str
    megabits: int
    is_ipv4: bool = True


def interfaces() -> list[Interface]:
    """Interfaces that are up and have an IP address, loopback included."""
    stats = psutil.net_if_stats()
    return [
        Interface(name, one.address.partition("%")[0], stats[name].speed, one.family == socket.AF_INET)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and name in stats and stats[name].isup
    ]


def interface_of(address: str) -> str:
    """The name of the network interface that has `address`; `""` if none has."""
    return next((one.name for one in interfaces() if one.address == address), "")


def reach(address: str, port: int) -> tuple[str, str]:
    """Why a connection to the store cannot be made (`""` if it can), and this host's own address on that route."""
    try:
        with socket.create_connection((address, port), timeout=_REACH_SECONDS) as connection:
            return "", str(connection.getsockname()[0])
    except OSError as error:
        return error.strerror or str(error), ""


def _obstacle(directory: str, job: Job) -> str:
    if not Path(directory).is_dir():
        return f"it has no folder {directory}; mount it, name another with --chdir, or copy this one with --rsync"
    try:
        os.chdir(directory)
        if not job.is_module:
            sys.path.insert(0, directory)
        job.check_script()
    except OSError as error:
        return f"the folder {directory} cannot be entered: {error.strerror}"
    except ShardwiseError as error:
        return str(error).rstrip(".")
    return ""
