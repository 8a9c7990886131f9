"""The checks of `doctor`. Each takes facts as arguments and returns one `Check`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.cli.meeting import Meeting
from shardwise.machine import Memory, TorchFacts
from shardwise.units import format_bytes, format_seconds

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
        return Check("python", "fail", found, "shardwise needs Python 3.11 or newer; make a new environment.")
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
    found = f"{num_cores}, of which the control group leaves {cpu_limit:g}"
    if cpu_limit < 1:
        cure = "Ranks will be throttled; raise the container's CPU limit to one core a rank."
        return Check("cores", "warn", found, cure)
    return Check("cores", "ok", found, f"At most {int(cpu_limit)} ranks with a core each.")


def check_memory(memory: Memory) -> Check:
    found = f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}"
    if memory.available_bytes < GIB:
        cure = "Less than 1 GiB: a rank's own torch takes about 300 MiB. Free memory, or raise the limit."
        return Check("memory", "warn", found, cure)
    return Check("memory", "ok", found)


def check_shm(total_bytes: int | None, free_bytes: int) -> Check:
    """`total_bytes` is None if there is no /dev/shm."""
    if total_bytes is None:
        cure = "NCCL and data loader workers pass data through it; on Linux, mount a tmpfs there."
        return Check("/dev/shm", "warn", "not there", cure)
    found = f"{format_bytes(free_bytes)} free of {format_bytes(total_bytes)}"
    if free_bytes < GIB:
        cure = "NCCL and data loader workers may fail; start the container with --shm-size=8g or --ipc=host."
        return Check("/dev/shm", "warn", found, cure)
    return Check("/dev/shm", "ok", found)


def check_shared_memory(obstacle: str) -> Check:
    """Whether ranks of this host can share memory; `obstacle` says why not."""
    if obstacle:
        cure = "Ranks send each other messages instead, which takes longer. Linux lets processes of one user share it."
        return Check("shared memory", "warn", obstacle, cure)
    return Check("shared memory", "ok", "one process reads another's")


def check_allocator(environ: Mapping[str, str], libc: str) -> Check:
    """glibc returns large blocks to the system only if they were mapped; a fixed threshold keeps it that way.

    Without it the threshold grows with the first large free, and the peak of a CPU rank stays resident.
    """
    name = "MALLOC_MMAP_THRESHOLD_"
    if libc != "glibc":
        return Check("allocator", "ok", f"{libc or 'not glibc'}; {name} has no say here")
    value = environ.get(name)
    if value is None:
        return Check("allocator", "ok", f"{name} is not set", "shardwise launch sets it for CPU ranks.")
    if not value.isdigit():
        return Check("allocator", "warn", f"{name}={value}", "It must be a number of bytes; unset it.")
    return Check("allocator", "ok", f"{name}={value}")


def check_threads(environ: Mapping[str, str], num_cores: int) -> Check:
    value = environ.get("OMP_NUM_THREADS")
    if value is None:
        return Check("threads", "ok", "OMP_NUM_THREADS is not set", "shardwise launch sets cores / ranks.")
    found = f"OMP_NUM_THREADS={value}"
    if not value.isdigit() or int(value) < 1:
        return Check("threads", "warn", found, "It must be a whole number of at least 1.")
    if int(value) > num_cores:
        cure = f"More threads than the {num_cores} cores slow each other down; set cores divided by ranks."
        return Check("threads", "warn", found, cure)
    return Check("threads", "ok", found)


def check_backends(facts: TorchFacts) -> Check:
    if not facts.backends:
        return Check("distributed", "fail", "torch.distributed is missing", "Install a torch built with it.")
    found = " and ".join(facts.backends)
    if "gloo" not in facts.backends:
        return Check("distributed", "warn", found, "Without gloo, ranks on the CPU cannot meet.")
    return Check("distributed", "ok", found)


def check_gpus(facts: TorchFacts) -> Check:
    if facts.gpu_trouble:
        return Check("gpus", "fail", facts.gpu_trouble, "Check the driver with nvidia-smi or rocm-smi.")
    if not facts.gpus:
        return Check("gpus", "ok", "none seen; ranks run on the CPU")
    found = "; ".join(
        f"{gpu.name}, {format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}" for gpu in facts.gpus
    )
    if "nccl" not in facts.backends:
        return Check("gpus", "fail", f"{found}, but no NCCL", "Install a torch built with NCCL (or RCCL).")
    if any(gpu.free_bytes < gpu.total_bytes / 2 for gpu in facts.gpus):
        return Check("gpus", "warn", found, "Someone else holds their memory; see nvidia-smi.")
    return Check("gpus", "ok", found)


def check_loopback(meeting: Meeting) -> Check:
    if meeting.is_late:
        cure = "This machine is busy, or its disk is slow. Give them longer with --timeout SECONDS."
        return Check("loopback", "warn", meeting.trouble, cure)
    if meeting.trouble:
        cure = "Ranks here cannot talk. Try GLOO_SOCKET_IFNAME=lo; see that a firewall lets loopback through."
        return Check("loopback", "fail", meeting.trouble, cure)
    return Check("loopback", "ok", f"two processes met and summed in {format_seconds(meeting.seconds)}")


def check_temp(folder: str, writable: bool, free_bytes: int) -> Check:
    if not writable:
        return Check("temp folder", "fail", f"{folder} cannot be written", "Point TMPDIR at a folder of yours.")
    found = f"{folder}, {format_bytes(free_bytes)} free"
    if free_bytes < GIB:
        return Check("temp folder", "warn", found, "Make room, or point TMPDIR at a larger disk.")
    return Check("temp folder", "ok", found)
