"""The cores of this host by NUMA node, socket and physical core, and its NVIDIA GPUs, as the kernel lists them.

Needs no torch and no driver library, because the launcher's part on a host has neither.

CUDA's order of different GPU models is not in these files, and a wrong guess would be worse than none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU: its PCI address, its UUID, and its NUMA node (-1 if the kernel does not know it)."""

    address: str
    uuid: str = ""
    model: str = ""
    node: int = -1


@dataclass(frozen=True)
class Topology:
    """The cores that a process may use. Cores and nodes have the kernel's numbers."""

    nodes: Mapping[int, tuple[int, ...]]
    """The cores of each NUMA node that has usable ones."""
    sockets: Mapping[int, int] = field(default_factory=dict)
    """The socket of each core; cores that are not listed are on one socket."""
    siblings: Mapping[int, int] = field(default_factory=dict)
    """For each core, the first hardware thread of its physical core; a core that is not listed is one of its own."""
    caches: Mapping[int, int] = field(default_factory=dict)
    """For each core, the first core that shares its last-level cache; a core that is not listed shares none."""
    gpus: tuple[Gpu, ...] = ()
    """By PCI address, the order of `CUDA_DEVICE_ORDER=PCI_BUS_ID`."""

    def core_complexes(self, node: int) -> list[tuple[int, ...]]:
        """The cores of a node by last-level cache, those with most usable cores first."""
        found: dict[int, list[int]] = {}
        for core in self.nodes[node]:
            found.setdefault(self.caches.get(core, core), []).append(core)
        return sorted(map(tuple, found.values()), key=lambda cores: (-len(cores), cores))

    def cores_of_socket(self, node: int) -> tuple[int, ...]:
        """The cores of all nodes on the socket of `node`."""
        here = self.sockets.get(self.nodes[node][0], 0)
        return tuple(core for cores in self.nodes.values() for core in cores if self.sockets.get(core, 0) == here)


def this_host() -> Topology:
    """The topology of this host, restricted to the cores that this process may use."""
    return read_topology(Path("/"), os.sched_getaffinity(0))


def read_topology(root: Path, usable: Collection[int]) -> Topology:
    """The topology in `sys` and `proc` below `root`, restricted to `usable` cores.

    Cores of which the kernel names no node (it was built without NUMA) count as one more node.
    """
    listed = sorted(root.glob("sys/devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = {int(path.name[4:]): _usable(_text(path / "cpulist"), usable) for path in listed}
    rest = tuple(sorted(set(usable).difference(*nodes.values())))
    nodes[max(nodes, default=-1) + 1] = rest
    folders = {core: root / f"sys/devices/system/cpu/cpu{core}/topology" for core in usable}
    siblings = {core: parse_cores(_text(folder / "thread_siblings_list")) for core, folder in folders.items()}
    sockets = {core: _number(_text(folder / "physical_package_id"), 0) for core, folder in folders.items()}
    return Topology(
        {node: cores for node, cores in nodes.items() if cores},
        sockets,
        {core: min(threads, default=core) for core, threads in siblings.items()},
        {core: min(_sharing_last_cache(root, core), default=core) for core in usable},
        _gpus(root),
    )


def visible_gpus(topology: Topology, environ: Mapping[str, str]) -> list[Gpu | None]:
    """The GPUs in the order in which CUDA numbers them for a process with `environ`; None for one that is unknown.

    By default CUDA puts the fastest GPU first, and GPUs of one model by PCI address. The order of different models is
    therefore unknown, unless `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set (CUDA C++ Programming Guide, "CUDA environment
    variables"). Entries of `CUDA_VISIBLE_DEVICES` are numbers or beginnings of UUIDs; parts of a GPU (MIG) are unknown.
    """
    by_number: list[Gpu | None] = list(topology.gpus)
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.model for gpu in topology.gpus}) > 1:
        by_number = [None] * len(by_number)
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return by_number
    return [_gpu_named(entry.strip(), by_number, topology.gpus) for entry in shown.split(",") if entry.strip()]


def parse_cores(text: str) -> list[int]:
    """The cores in a list such as `0-2,8`, the kernel's format."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores


def format_cores(cores: Collection[int]) -> str:
    """The inverse of `parse_cores`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _gpu_named(entry: str, by_number: list[Gpu | None], gpus: tuple[Gpu, ...]) -> Gpu | None:
    if entry.isdecimal():
        return by_number[int(entry)] if int(entry) < len(by_number) else None
    found = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _gpus(root: Path) -> tuple[Gpu, ...]:
    """The GPUs of NVIDIA's driver, which lists only those that this container has."""
    folders = root.glob("proc/driver/nvidia/gpus/*")
    found = []
    for folder in sorted(folders, key=lambda path: [int(number, 16) for number in re.split("[:.]", path.name)]):
        lines = (line.partition(":") for line in _text(folder / "information").splitlines())
        told = {name.strip(): value.strip() for name, _, value in lines}
        node = _number(_text(root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node"), -1)
        found.append(Gpu(folder.name.lower(), told.get("GPU UUID", ""), told.get("Model", ""), node))
    return tuple(found)


def _sharing_last_cache(root: Path, core: int) -> list[int]:
    """The cores that share the last-level cache of one; empty if the kernel does not tell."""
    folders = [
        folder
        for folder in root.glob(f"sys/devices/system/cpu/cpu{core}/cache/index[0-9]*")
        if _text(folder / "type") in ("Unified", "Data")
    ]
    last = max(folders, key=lambda folder: _number(_text(folder / "level"), 0), default=None)
    return [] if last is None else parse_cores(_text(last / "shared_cpu_list"))


def _usable(text: str, usable: Collection[int]) -> tuple[int, ...]:
    return tuple(core for core in parse_cores(text) if core in usable)


def _number(text: str, default: int) -> int:
    return int(text) if re.fullmatch(r"-?\d+", text) else default


def _text(path: Path) -> str:
    """The contents of a file, empty if it cannot be read: what the kernel does not tell is unknown."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
