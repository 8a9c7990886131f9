"""What a host has to say of itself before anything starts on it. Nothing here imports torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from shardwise.errors import ShardwiseError
from shardwise.launch.hosts.wire import Message
from shardwise.launch.job import Job
from shardwise.version import __version__

_DEVICE_FILES = {"/dev/nvidiactl": "cuda", "/dev/kfd": "cuda", "/dev/accel/accel0": "hpu", "/dev/davinci0": "npu"}
_REACH_SECONDS = 5


def look(directory: str, job: Job) -> Message:
    """Go to the `directory`, and tell versions, the clock, and what is in the way of `job` (`""`: nothing)."""
    return {
        "said": "facts",
        "python": platform.python_version(),
        "shardwise": __version__,
        "torch": _version_of("torch"),
        "time": time.time(),
        "problem": _obstacle(directory, job),
    }


def kind_by_files() -> str | None:
    """The kind of accelerator whose driver is here, as torch names it; None if there is none that we know."""
    return next((kind for path, kind in _DEVICE_FILES.items() if os.path.exists(path)), None)


def own_address(env: Mapping[str, str]) -> str:
    """The address of this host to which ssh connected; `""` if this is not ssh's process."""
    words = env.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else ""


def interface_of(address: str) -> str:
    """The name of the network interface that has `address`; `""` if none has."""
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if any(one.address.partition("%")[0] == address for one in addresses)
        ),
        "",
    )


def reach(address: str, port: int) -> str:
    """Why a connection to the first host cannot be made; `""` if it can."""
    try:
        with socket.create_connection((address, port), timeout=_REACH_SECONDS):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _obstacle(directory: str, job: Job) -> str:
    if not Path(directory).is_dir():
        return f"there is no folder {directory}; mount it, name another with --chdir, or copy this one with --rsync"
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
