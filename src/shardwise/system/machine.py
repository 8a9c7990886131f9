"""What this process may use of its machine: a container's limits count, not the host's figures.

Control groups: https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html. A limit
set on any group above ours binds us too, so the walk goes up and the tightest wins.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

SLOW_BF16 = 2.5
"""A processor is slow at bf16 if it takes this many times as long as in fp32. Nothing was found between 1.7 and 5."""


@dataclass(frozen=True)
class Memory:
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class TorchFacts:
    """What the installed torch is and sees; `backends` are those of gloo and nccl that are built in."""

    version: str
    build: str
    backends: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    gpu_trouble: str = ""
    nccl: str = ""
    """The version of NCCL, if it is built in."""
    bf16_ratio: float = 0.0
    """How many times as long as in fp32 a product of matrices takes in bf16 on the processor; 0 if unknown."""


@dataclass(frozen=True)
class Cgroups:
    """The control groups of one process; where to read them is an argument, so that a test can write them."""

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def cpu_limit(self) -> float | None:
        """How many cores' worth of time this process may use; None where nothing limits it."""
        limits = []
        for folder in self._folders("cpu"):
            quota, period = _words(folder / "cpu.max") or ["max", "1"]
            if quota == "max":
                quota, period = _word(folder / "cpu.cfs_quota_us"), _word(folder / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit() and int(period) > 0:
                limits.append(int(quota) / int(period))
        return min(limits, default=None)

    def memory(self, host: Memory) -> Memory:
        """`host`, narrowed to what the groups leave. Cached file pages do not count as used."""
        for folder in self._folders("memory"):
            limit = _word(folder / "memory.max") or _word(folder / "memory.limit_in_bytes")
            used = _word(folder / "memory.current") or _word(folder / "memory.usage_in_bytes")
            if limit.isdigit() and used.isdigit() and int(limit) < host.total_bytes:
                free = max(0, int(limit) - int(used) + _reclaimable(folder / "memory.stat"))
                host = Memory(int(limit), min(host.available_bytes, free, int(limit)))
        return host

    def _folders(self, controller: str) -> Iterator[Path]:
        """Our group for `controller` and those above it, as versions 2 (`0::/path`) and 1 name them."""
        for line in _read(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                base = self.root
            elif controller in controllers.split(","):
                base = self.root / controller
            else:
                continue
            own = base / path.strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base))


def num_cores() -> int:
    """Cores this process may be scheduled on (`taskset`, Slurm and Kubernetes' static policy narrow it)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_machine(devices: Sequence[str] = ()) -> str:
    """What figures measured here hold for: host, processor, cores that may be used, memory, and `devices` by name."""
    memory = round(psutil.virtual_memory().total / 2**30)
    return "; ".join((socket.gethostname(), _processor(), f"{num_cores()} cores", f"{memory} GiB", *devices))


def _processor() -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part")))
    return next(names, "") or platform.processor() or platform.machine()


@cache
def processor_vendor() -> str:
    """In the processor's own words, such as `AuthenticAMD`; empty if it has none."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def host_memory() -> Memory:
    memory = psutil.virtual_memory()
    return Memory(memory.total, memory.available)


def memory_here() -> Memory:
    """That of the host, narrowed to what our control groups leave."""
    return Cgroups().memory(host_memory())


def _reclaimable(stat: Path) -> int:
    """Bytes of cached files that the kernel drops before anything is killed."""
    figures = dict(line.split(" ", 1) for line in _read(stat).splitlines() if " " in line)
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""  # another kernel, or another version of control groups: no limit from here


def _words(path: Path) -> list[str]:
    return _read(path).split()


def _word(path: Path) -> str:
    return _read(path).strip()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by a signal or a tracer. False where the system does not report it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # its name may be any bytes
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in ("T", "t")
