"""Which cores and which device each rank of a host gets. Pure, but for `numa_nodes`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardwise.errors import ConfigError

CORES = "SHARDWISE_CORES"
"""The variable with the cores to which a rank binds itself at its start."""
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}


def share_cores(nodes: Sequence[Sequence[int]], num_ranks: int) -> list[list[int]]:
    """Cores for each of `num_ranks`, if possible on one NUMA node per rank: consecutive ranks on consecutive cores.

    `nodes` are the cores of each NUMA node. Raises `ConfigError` if there are fewer cores than ranks.
    """
    cores = [core for node in nodes for core in node]
    if len(cores) < num_ranks:
        raise ConfigError(
            f"--bind cores: {num_ranks} ranks cannot share {len(cores)} cores. Start at most {len(cores)} ranks here, "
            f"or remove --bind."
        )
    filled = [node for node in nodes if node]
    if num_ranks % len(filled):
        return _split(cores, num_ranks)
    per_node = num_ranks // len(filled)
    if any(len(node) < per_node for node in filled):
        return _split(cores, num_ranks)
    return [share for node in filled for share in _split(node, per_node)]


def numa_nodes() -> list[list[int]]:
    """The cores that this process may use, by NUMA node."""
    usable = set(os.sched_getaffinity(0))
    found = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = [[core for core in parse_cores((path / "cpulist").read_text()) if core in usable] for path in found]
    known = {core for node in nodes for core in node}
    rest = sorted(usable - known)
    return [node for node in [*nodes, rest] if node]


def parse_cores(text: str) -> list[int]:
    """The cores in a list such as `0-2,8`, the kernel's format."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores


def show_one_device(kind: str, index: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variable that shows a process only the `index`-th of the devices it would see otherwise.

    Raises `ConfigError` if that variable is not known for this kind of device, or if there are too few devices.
    """
    if kind not in _VISIBLE:
        raise ConfigError(
            f"--devices one: no variable is known that shows a process only one {kind} device. Use --devices all."
        )
    name = _VISIBLE[kind]
    if not inherited.get(name):
        return {name: str(index)}
    visible = inherited[name].split(",")
    if index >= len(visible):
        raise ConfigError(
            f"--devices one: {name}={inherited[name]} shows {len(visible)} devices, fewer than ranks. Show more, or "
            f"start fewer ranks."
        )
    return {name: visible[index].strip()}


def bindings(
    num_ranks: int,
    inherited: Mapping[str, str],
    *,
    nodes: Sequence[Sequence[int]] | None = None,
    kind: str | None = None,
) -> list[dict[str, str]]:
    """Variables for each of a host's ranks: its cores, if `nodes` is given; its one device, if a `kind` is given."""
    result: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    if nodes is not None:
        for settings, cores in zip(result, share_cores(nodes, num_ranks), strict=True):
            settings[CORES] = ",".join(map(str, cores))
    if kind is not None:
        for rank, settings in enumerate(result):
            settings |= show_one_device(kind, rank, inherited)
    return result


def _split(cores: Sequence[int], num: int) -> list[list[int]]:
    """`cores` in `num` consecutive parts, as equal as possible."""
    return [list(cores[part * len(cores) // num : (part + 1) * len(cores) // num]) for part in range(num)]
