"""What a result was measured on, without names: processor, cores, memory, versions, and how busy it was."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fresh import ROOT
from shardwise.launch.environment import MALLOC_SETTINGS

PACKAGES = ("torch", "deepspeed", "torchft", "numpy")


def header(note: str = "") -> dict[str, Any]:
    """What every result begins with."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": note,
        "machine": describe_machine(),
        "versions": versions(),
        "settings": allocator_settings(os.environ),
        "commit": _commit(),
    }


def describe_machine() -> dict[str, Any]:
    return {
        "processor": processor(Path("/proc/cpuinfo")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": _gpus(),
        "load_average_at_start": load_average(),
    }


def processor(cpuinfo: Path) -> str:
    """The model name, as the kernel has it; where there is no such file, what Python knows."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    rows = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in rows if key.strip() == "model name"), "unknown")


def load_average() -> float:
    """Processes that ran or wanted to, on average over the last minute."""
    return round(psutil.getloadavg()[0], 2)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def allocator_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What the launcher gives every rank of every engine."""
    return {"OMP_NUM_THREADS": "1", **{name: environ.get(name, value) for name, value in MALLOC_SETTINGS.items()}}


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _commit() -> str:
    """The commit of the checkout, with a `+` if files were changed since; empty without git."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "src", "benchmarks") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
