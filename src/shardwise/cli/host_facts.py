"""Facts of the machine for doctor: limits, network, clock, disk, versions, and leftovers of dead jobs."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from shardwise.system.job_folder import JOB_LOCK

DISK_BYTES = 32 * 2**20
DISK_SECONDS = 1.0
"""For writing, and for reading; a slow disk is measured with fewer bytes."""
_UNSYNCHRONIZED = 0x40
"""STA_UNSYNC of adjtimex(2)."""
_WORKER = "shardwise.launch.worker"


def address_of_own_name() -> str:
    """The address that this host's own name resolves to; empty if it does not resolve."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def limits() -> dict[str, int]:
    """Soft limits by name; -1 means none."""
    numbers = {"open files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
    numbers["locked memory"] = resource.RLIMIT_MEMLOCK
    return {name: resource.getrlimit(limit)[0] for name, limit in numbers.items()}


def clock_is_synchronized() -> bool | None:
    """Whether this clock is synchronized; `None` if the kernel does not say."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        buffer = ctypes.create_string_buffer(512)  # struct timex, all zeros: only query
        state = libc.adjtimex(buffer)
    except (AttributeError, OSError, TypeError):
        return None
    if state < 0:
        return None
    status = int.from_bytes(buffer.raw[40:44], "little") if ctypes.sizeof(ctypes.c_long) == 8 else 0
    return not status & _UNSYNCHRONIZED


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second to and from a folder, bypassing the page cache if the system allows that."""

    write: float
    read: float


def disk_rates(folder: Path, num_bytes: int = DISK_BYTES, clock: Callable[[], float] = time.perf_counter) -> DiskRates:
    """Write a file of at most `num_bytes` into `folder`, read it again, remove it; a slow disk is given 1 s for each,
    and a block at least. Raises `OSError` if that fails."""
    block = os.urandom(min(num_bytes, 2**22))
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shardwise-doctor-") as file:
        started = clock()
        num_written = 0
        while not num_written or (num_written < num_bytes and clock() - started < DISK_SECONDS):
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            num_written += len(block)
        written = clock()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        num_read = 0
        while (not num_read or clock() - written < DISK_SECONDS) and (found := file.read(len(block))):
            num_read += len(found)
        read = clock()
    return DiskRates(num_written / (written - started), num_read / (read - written))


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The version of NVIDIA's kernel module; empty if there is none."""
    try:
        found = re.search(r"Kernel Module\D*(\d[\d.]+)", proc.read_text())
    except OSError:
        return ""
    return found[1] if found else "unknown"


def conflicts(requirements: Iterable[str]) -> list[str]:
    """Installed packages that violate `requirements` (such as `torch>=2.11`), as texts.

    For requirements of an extra only installed packages count. Those with other markers than `extra` are skipped.
    """
    wrong = []
    for requirement in requirements:
        wanted, _, mark = requirement.partition(";")
        match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*\(?([^)]*)\)?", wanted)
        if match is None or (mark and "extra" not in mark):
            continue
        name, bounds = match[1], match[2].strip()
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            if not mark:
                wrong.append(f"{name} is not installed")
            continue
        if not _fits(installed, bounds):
            wrong.append(f"{name} is {installed}, but {bounds} is needed")
    return wrong


def _fits(version: str, bounds: str) -> bool:
    """Checks `>=` and `<` only; other bounds are ignored."""
    have = _numbers(version)
    for bound in filter(None, map(str.strip, bounds.split(","))):
        if bound.startswith(">=") and have < _numbers(bound[2:]):
            return False
        if re.match(r"<[^=]", bound) and have >= _numbers(bound[1:]):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


@dataclass(frozen=True)
class Leftovers:
    """Leftovers of finished jobs: folders of launchers, ranks without a launcher, shared memory of dead processes."""

    folders: tuple[Path, ...] = ()
    orphans: tuple[int, ...] = ()
    shared: tuple[Path, ...] = ()
    shared_bytes: int = 0


def leftovers(temp: Path, shm: Path = Path("/dev/shm")) -> Leftovers:
    """The leftovers of this user's jobs."""
    shared = [path for path in shm.glob("torch_*") if _is_ours(path) and _owner_is_gone(path)]
    return Leftovers(
        tuple(sorted(folder for folder in temp.glob("shardwise-*") if _is_dead(folder))),
        tuple(_orphans()),
        tuple(sorted(shared)),
        sum(path.stat().st_size for path in shared if path.exists()),
    )


def _is_dead(folder: Path) -> bool:
    """See [Note: abandoned folders] in launch/log_folder.py."""
    try:
        lock = os.open(folder / JOB_LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _is_ours(path: Path) -> bool:
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def _owner_is_gone(path: Path) -> bool:
    """torch names its files `torch_PID_...`."""
    number = path.name.split("_")[1] if path.name.count("_") >= 2 else ""
    return number.isdigit() and not psutil.pid_exists(int(number))


def _orphans() -> Iterable[int]:
    """Ranks of `shardwise launch` without a launcher; none if the kernel ends them with it."""
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "uids"]):
        info = process.info
        is_ours = info["uids"] is not None and info["uids"].real == os.getuid()
        if is_ours and info["ppid"] == 1 and _WORKER in (info["cmdline"] or ()):
            yield int(info["pid"])
