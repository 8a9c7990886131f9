"""The checks of `doctor`. Each takes facts as arguments and returns one `Check`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.cli.loopback import LoopbackResult
from shardwise.system.machine import SLOW_BF16, Memory, TorchFacts
from shardwise.system.units import format_bytes, format_seconds

GIB = 2**30
MIN_PYTHON = (3, 11)
MIN_TORCH = (2, 11)


@dataclass(frozen=True)
class Check:
    """One result: what was found and, if something is wrong, how to fix it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    cure: str = ""


def check_python(version: tuple[int, ...]) -> Check:
    found = ".".join(map(str, version[:3]))
    if version[:2] < MIN_PYTHON:
        return Check("python", "fail", found, "shardwise needs Python 3.11 or newer: create a new environment.")
    return Check("python", "ok", found)


def check_torch(facts: TorchFacts | str) -> Check:
    """`facts`, or the reason why torch could not be imported."""
    if isinstance(facts, str):
        return Check("torch", "fail", f"cannot be imported: {facts}", "pip install 'torch>=2.11'")
    found = f"{facts.version}, {facts.build} build"
    numbers = tuple(int(number) for number in re.findall(r"\d+", facts.version)[:2])
    if numbers < MIN_TORCH:
        return Check("torch", "fail", found, "shardwise needs torch 2.11: pip install -U 'torch>=2.11'")
    return Check("torch", "ok", found)


def check_cores(num_cores: int, cpu_limit: float | None) -> Check:
    if cpu_limit is None or cpu_limit >= num_cores:
        return Check("cores", "ok", str(num_cores))
    found = f"{num_cores}, of which the cgroup allows {cpu_limit:g}"
    if cpu_limit < 1:
        cure = "Ranks will be throttled: raise the container's CPU limit to at least one core per rank."
        return Check("cores", "warn", found, cure)
    return Check("cores", "ok", found, f"Start at most {int(cpu_limit)} ranks, for a core each.")


def check_memory(memory: Memory) -> Check:
    found = f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}"
    if memory.available_bytes < GIB:
        cure = "Less than 1 GiB, and torch takes about 300 MiB per rank: free memory, or raise the limit."
        return Check("memory", "warn", found, cure)
    return Check("memory", "ok", found)


def check_shm(total_bytes: int | None, free_bytes: int) -> Check:
    """`total_bytes` is None if there is no /dev/shm."""
    if total_bytes is None:
        cure = "NCCL and data loader workers need it: on Linux, mount a tmpfs there."
        return Check("/dev/shm", "warn", "missing", cure)
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes < GIB:
        cure = "NCCL and data loader workers may fail: start the container with --shm-size=8g or --ipc=host."
        return Check("/dev/shm", "warn", found, cure)
    return Check("/dev/shm", "ok", found)


def check_shared_memory(obstacle: str) -> Check:
    """Whether ranks of this host can share memory; `obstacle` says why not."""
    if obstacle:
        cure = "Ranks use messages instead, which are slower. See whether a sandbox forbids reading /proc/PID/fd."
        return Check("shared memory", "warn", obstacle, cure)
    return Check("shared memory", "ok", "processes can share it")


def check_allocator(environ: Mapping[str, str], libc: str) -> Check:
    """glibc returns large blocks to the system only if they were mapped; a fixed threshold keeps it that way.

    Without it the threshold grows with the first large free, and the peak of a CPU rank stays resident.
    """
    name = "MALLOC_MMAP_THRESHOLD_"
    if libc != "glibc":
        return Check("allocator", "ok", f"{libc or 'not glibc'}; {name} does not apply")
    value = environ.get(name)
    if value is None:
        return Check("allocator", "ok", f"{name} is not set", "`shardwise launch` sets it for CPU ranks.")
    if not value.isdigit():
        return Check("allocator", "warn", f"{name}={value}", "It must be a number of bytes: unset it.")
    return Check("allocator", "ok", f"{name}={value}")


def check_threads(environ: Mapping[str, str], num_cores: int) -> Check:
    value = environ.get("OMP_NUM_THREADS")
    if value is None:
        return Check("threads", "ok", "OMP_NUM_THREADS is not set", "`shardwise launch` sets it to cores / ranks.")
    found = f"OMP_NUM_THREADS={value}"
    if not value.isdigit() or int(value) < 1:
        return Check("threads", "warn", found, "It must be a whole number, 1 or more: unset it.")
    if int(value) > num_cores:
        cure = f"More threads than the {num_cores} cores slow each other down: set it to cores / ranks."
        return Check("threads", "warn", found, cure)
    return Check("threads", "ok", found)


def check_bf16(ratio: float) -> Check:
    """`ratio` as in `TorchFacts.bf16_ratio`."""
    found = f"products of matrices take {ratio:.2g} times as long in bf16 as in fp32"
    if ratio > SLOW_BF16:
        cure = "This processor has no instructions for bf16: without a GPU, set precision: auto or fp32."
        return Check("processor", "ok", found, cure)
    return Check("processor", "ok", found)


def check_backends(facts: TorchFacts) -> Check:
    if not facts.backends:
        return Check("distributed", "fail", "torch.distributed is missing", "Install a torch built with it.")
    found = " and ".join(facts.backends)
    if "gloo" not in facts.backends:
        return Check("distributed", "warn", found, "Without gloo, CPU ranks cannot communicate.")
    return Check("distributed", "ok", found)


def check_gpus(facts: TorchFacts) -> Check:
    if facts.gpu_trouble:
        return Check("gpus", "fail", facts.gpu_trouble, "Check the driver with nvidia-smi or rocm-smi.")
    if not facts.gpus:
        return Check("gpus", "ok", "none; ranks use the CPU")
    found = "; ".join(
        f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}" for gpu in facts.gpus
    )
    if "nccl" not in facts.backends:
        return Check("gpus", "fail", f"{found}, but no NCCL", "Install a torch built with NCCL (or RCCL).")
    if any(gpu.free_bytes < gpu.total_bytes / 2 for gpu in facts.gpus):
        return Check("gpus", "warn", found, "Other processes use their memory: see nvidia-smi.")
    return Check("gpus", "ok", found)


def check_loopback(result: LoopbackResult) -> Check:
    if result.is_late:
        cure = "This machine is busy, or its disk is slow: give more time with --timeout SECONDS."
        return Check("loopback", "warn", result.trouble, cure)
    if result.trouble:
        cure = "Ranks on this machine cannot connect: set GLOO_SOCKET_IFNAME=lo, and let the firewall pass loopback."
        return Check("loopback", "fail", result.trouble, cure)
    return Check("loopback", "ok", f"two processes connected and summed in {format_seconds(result.seconds)}")


def check_temp(folder: str, writable: bool, free_bytes: int) -> Check:
    if not writable:
        return Check("temp folder", "fail", f"{folder} cannot be written", "Set TMPDIR to a folder of yours.")
    found = f"{folder}, {format_bytes(free_bytes)} free"
    if free_bytes < GIB:
        return Check("temp folder", "warn", found, "Free space, or set TMPDIR to a folder on a larger disk.")
    return Check("temp folder", "ok", found)
