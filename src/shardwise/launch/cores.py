"""Which cores and which device each rank of a host gets. Pure.

Memory is not bound (`numactl --membind`, as in DeepSpeed's launcher): the kernel allocates on the node of the core that
writes a page first, and a rank writes its own shards; bound, a full node would kill a rank while others have room.
Shares are whole physical cores: Linux on x86 numbers all first hardware threads before all second ones, so consecutive
numbers would give two ranks the same cores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import ConfigError
from shardwise.launch.environment import default_threads
from shardwise.launch.topology import Gpu, Topology, format_cores, visible_gpus

CORES = "SHARDWISE_CORES"
"""The variable with the cores to which a rank binds itself at its start."""
BINDINGS = ("none", "cores", "node", "socket", "core-complex")
"""Values of `--bind`: to cores of its own, or to all of a NUMA node, of a socket, or of a last-level cache."""
_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}


@dataclass(frozen=True)
class Seat:
    """The cores to which a rank is bound, and the GPU because of which it gets them."""

    cores: tuple[int, ...]
    node: int | None = None
    """Their NUMA node, if all are on one."""
    gpu: Gpu | None = None

    def __str__(self) -> str:
        where = "several NUMA nodes" if self.node is None else f"NUMA node {self.node}"
        near = f", the node of GPU {self.gpu.address}" if self.gpu is not None else ""
        return f"cores {format_cores(self.cores)} of {where}{near}"


def seats(topology: Topology, bind: str, num_ranks: int, inherited: Mapping[str, str], kind: str | None) -> list[Seat]:
    """The seat of each of `num_ranks` ranks of a host, for a value of `--bind` other than `none`.

    Ranks with NVIDIA GPUs (`kind` is `cuda`) are bound near the GPU with their local rank's number. Others are bound
    in order, consecutive ranks on consecutive cores; also all ranks of a host if the node of any GPU is unknown or has
    no usable core. `inherited` is the ranks' environment. Raises `ConfigError` if there are fewer cores than ranks.
    """
    near = _gpus_of_ranks(topology, num_ranks, inherited) if kind == "cuda" else None
    if bind == "cores":
        cores = share_cores(topology, num_ranks) if near is None else _share_near(topology, near)
    else:
        nodes = _in_order(topology, num_ranks) if near is None else [gpu.node for gpu in near]
        cores = _shared_cores(topology, nodes, bind)
    return [Seat(own, _node_of(topology, own), None if near is None else near[rank]) for rank, own in enumerate(cores)]


def share_cores(topology: Topology, num_ranks: int) -> list[tuple[int, ...]]:
    """Cores of its own for each of `num_ranks`, if possible on one NUMA node per rank: consecutive ranks on consecutive
    cores. Two ranks share no physical core, if there are enough.

    Raises `ConfigError` if there are fewer cores than ranks.
    """
    nodes = list(topology.nodes.values())
    everything = [core for node in nodes for core in node]
    if len(everything) < num_ranks:
        raise _too_few(num_ranks, len(everything))
    per_node = num_ranks // len(nodes)
    if num_ranks % len(nodes) or any(len(node) < per_node for node in nodes):
        return _split(everything, num_ranks, topology.siblings)
    return [share for node in nodes for share in _split(node, per_node, topology.siblings)]


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
    bound: Sequence[Seat] = (),
    threads: int | None = None,
    kind: str | None = None,
) -> list[dict[str, str]]:
    """Variables for each of a host's ranks: its cores, if it has a seat; its one device, if a `kind` is given.

    A rank gets no more threads than cores, unless the user chose their number (`threads`, or in `inherited`).
    """
    result: list[dict[str, str]] = [{} for _ in range(num_ranks)]
    most = default_threads(num_ranks)
    is_free = threads is None and "OMP_NUM_THREADS" not in inherited
    for settings, seat in zip(result, bound, strict=False):
        settings[CORES] = format_cores(seat.cores)
        if is_free and len(seat.cores) < most:
            settings["OMP_NUM_THREADS"] = str(len(seat.cores))
    if kind is not None:
        for rank, settings in enumerate(result):
            settings |= show_one_device(kind, rank, inherited)
    return result


def _in_order(topology: Topology, num_ranks: int) -> list[int]:
    """The node of each rank: consecutive ranks on consecutive nodes."""
    nodes = list(topology.nodes)
    return [nodes[rank * len(nodes) // num_ranks] for rank in range(num_ranks)]


def _shared_cores(topology: Topology, nodes: Sequence[int], bind: str) -> list[tuple[int, ...]]:
    """The cores of each rank, given its node, for values of `--bind` by which ranks may share cores. Ranks of a node
    take turns at its last-level caches."""
    if bind == "node":
        return [topology.nodes[node] for node in nodes]
    if bind == "socket":
        return [topology.cores_of_socket(node) for node in nodes]
    complexes = {node: topology.core_complexes(node) for node in nodes}
    turns = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    return [complexes[node][turn % len(complexes[node])] for node, turn in zip(nodes, turns, strict=True)]


def _gpus_of_ranks(topology: Topology, num_ranks: int, inherited: Mapping[str, str]) -> list[Gpu] | None:
    """Each rank's GPU; None unless all are known, with nodes that have usable cores."""
    shown = visible_gpus(topology, inherited)[:num_ranks]
    known = [gpu for gpu in shown if gpu is not None and gpu.node in topology.nodes]
    return known if len(known) == num_ranks else None


def _share_near(topology: Topology, gpus: Sequence[Gpu]) -> list[tuple[int, ...]]:
    """Cores of its own for the rank of each GPU, all on the GPU's node."""
    shares: dict[int, list[tuple[int, ...]]] = {}
    for node in {gpu.node for gpu in gpus}:
        cores, num = topology.nodes[node], sum(gpu.node == node for gpu in gpus)
        if len(cores) < num:
            raise _too_few(num, len(cores), f" of NUMA node {node}, where their GPUs are")
        shares[node] = _split(cores, num, topology.siblings)
    return [shares[gpu.node].pop(0) for gpu in gpus]


def _too_few(num_ranks: int, num_cores: int, where: str = "") -> ConfigError:
    return ConfigError(
        f"--bind cores: {num_ranks} ranks cannot share {num_cores} cores{where}. Start at most {num_cores} ranks here, "
        f"or remove --bind."
    )


def _node_of(topology: Topology, cores: Iterable[int]) -> int | None:
    nodes = {node for node, listed in topology.nodes.items() if not set(listed).isdisjoint(cores)}
    return nodes.pop() if len(nodes) == 1 else None


def _split(cores: Sequence[int], num: int, siblings: Mapping[int, int]) -> list[tuple[int, ...]]:
    """`cores` in `num` consecutive parts, as equal as possible: of physical cores, or of single threads if fewer."""
    threads: dict[int, list[int]] = {}
    for core in cores:
        threads.setdefault(siblings.get(core, core), []).append(core)
    physical = list(threads.values()) if len(threads) >= num else [[core] for core in cores]
    ends = [part * len(physical) // num for part in range(num + 1)]
    return [tuple(core for one in physical[low:high] for core in one) for low, high in pairwise(ends)]
