"""The cores that each rank of a host gets, near its GPU, on hosts whose /sys and /proc are made up."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.launch.cores import CORES, Seat, bindings, seats, share_cores
from shardwise.launch.job import Elastic, Job, describe
from shardwise.launch.places.k8s import PodRequest, plan_k8s
from shardwise.launch.places.slurm import SlurmRequest, plan_srun
from shardwise.launch.topology import Gpu, Topology, format_cores, parse_cores, read_topology, this_host, visible_gpus

H100 = "NVIDIA H100 80GB HBM3"
GPUS = {  # as their addresses sort as numbers: not the order of the nodes
    "0000:1b:00.0": (1, "GPU-aaaa1111", H100),
    "0000:5d:00.0": (0, "GPU-bbbb2222", H100),
    "0000:9f:00.0": (0, "GPU-cccc3333", H100),
    "0001:0a:00.0": (1, "GPU-dddd4444", H100),
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def make_host(
    root: Path,
    nodes: Sequence[Sequence[int]],
    *,
    gpus: Mapping[str, tuple[int, str, str]] = GPUS,
    sockets: Sequence[int] = (),
    num_threads: int = 1,
) -> None:
    """Write what the kernel and NVIDIA's driver tell. A physical core has `num_threads` hardware threads, numbered as
    x86 does: first each core's first, then each core's second."""
    cores = sorted(core for node in nodes for core in node)
    for node, own in enumerate(nodes):
        write(root / f"sys/devices/system/node/node{node}/cpulist", format_cores(own))
        for core in own:
            cache = root / f"sys/devices/system/cpu/cpu{core}/cache"
            for index, (level, kind, shared) in enumerate([(1, "Instruction", [core]), (3, "Unified", _of(own, core))]):
                write(cache / f"index{index}/level", str(level))
                write(cache / f"index{index}/type", kind)
                write(cache / f"index{index}/shared_cpu_list", format_cores(shared))
            folder, step = root / f"sys/devices/system/cpu/cpu{core}/topology", len(cores) // num_threads
            write(folder / "physical_package_id", str(sockets[node] if sockets else node))
            write(folder / "thread_siblings_list", ",".join(str(core % step + n * step) for n in range(num_threads)))
    for address, (node, uuid, model) in gpus.items():
        write(root / f"sys/bus/pci/devices/{address}/numa_node", str(node))
        told = f"Model: \t\t {model}\nIRQ:   \t\t 16\nGPU UUID: \t {uuid}\nBus Location: \t {address}"
        write(root / f"proc/driver/nvidia/gpus/{address}/information", told)


def _of(node: Sequence[int], core: int) -> list[int]:
    """The cores that share a last-level cache: each four of a node."""
    place = list(node).index(core) // 4 * 4
    return list(node)[place : place + 4]


def host(tmp_path: Path, nodes: Sequence[Sequence[int]] = (range(8), range(8, 16)), **more: object) -> Topology:
    make_host(tmp_path, nodes, **more)  # type: ignore[arg-type]
    return read_topology(tmp_path, {core for node in nodes for core in node})


def cores_of(found: Sequence[Seat]) -> list[str]:
    return [format_cores(seat.cores) for seat in found]


class TestNearGpus:
    def test_each_rank_gets_cores_of_its_gpu_s_node(self, tmp_path: Path) -> None:
        found = seats(host(tmp_path), "cores", 4, {}, "cuda")
        assert cores_of(found) == ["8-11", "0-3", "4-7", "12-15"]
        assert str(found[0]) == "cores 8-11 of NUMA node 1, the node of GPU 0000:1b:00.0"

    def test_all_cores_of_the_node_as_torchrun_s_node_does(self, tmp_path: Path) -> None:
        assert cores_of(seats(host(tmp_path), "node", 4, {}, "cuda")) == ["8-15", "0-7", "0-7", "8-15"]

    def test_a_socket_may_have_several_nodes(self, tmp_path: Path) -> None:
        nodes = [range(4 * node, 4 * node + 4) for node in range(4)]
        topology = host(tmp_path, nodes, sockets=[0, 0, 1, 1], gpus={"0000:1b:00.0": (3, "GPU-a", H100)})
        assert cores_of(seats(topology, "socket", 1, {}, "cuda")) == ["8-15"]
        assert cores_of(seats(topology, "node", 1, {}, "cuda")) == ["12-15"]
        assert seats(topology, "socket", 1, {}, "cuda")[0].node is None

    def test_ranks_of_a_node_take_turns_at_its_core_complexes(self, tmp_path: Path) -> None:
        gpus = {f"0000:0{n}:00.0": (int(n > 2), f"GPU-{n}", H100) for n in range(1, 7)}
        topology = host(tmp_path, [range(6), range(6, 18)], gpus=gpus)
        assert cores_of(seats(topology, "core-complex", 6, {}, "cuda")) == [
            "0-3",
            "4-5",
            "6-9",
            "10-13",
            "14-17",
            "6-9",
        ]
        narrow = read_topology(tmp_path, {1, 4, 5, *range(6, 18)})
        assert cores_of(seats(narrow, "core-complex", 2, {}, "cuda")) == ["4-5", "1"]  # those with most usable cores

    def test_no_two_ranks_share_a_physical_core(self, tmp_path: Path) -> None:
        """Core 3 and core 19 are one; consecutive numbers would give rank 3 what rank 1 has."""
        nodes = [[*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]]
        topology = host(tmp_path, nodes, num_threads=2)
        assert cores_of(seats(topology, "cores", 4, {}, "cuda")) == [
            "8-11,24-27",
            "0-3,16-19",
            "4-7,20-23",
            "12-15,28-31",
        ]
        few = host(tmp_path / "few", [[0, 2], [1, 3]], num_threads=2)
        shared = [{topology.siblings[core] for core in seat.cores} for seat in seats(topology, "cores", 3, {}, None)]
        assert all(one.isdisjoint(other) for one in shared for other in shared if one is not other)
        assert len({seat.cores for seat in seats(few, "cores", 4, {}, None)}) == 4  # more ranks than physical cores

    @pytest.mark.parametrize(
        ("shown", "addresses"),
        [
            ("3,1", ["0001:0a:00.0", "0000:5d:00.0"]),
            ("GPU-cccc, GPU-aaaa1111", ["0000:9f:00.0", "0000:1b:00.0"]),
            ("MIG-5f,0", [None, "0000:1b:00.0"]),
            ("7", [None]),
            ("", []),
        ],
    )
    def test_ranks_see_what_cuda_shows_them(self, shown: str, addresses: list[str | None], tmp_path: Path) -> None:
        found = visible_gpus(host(tmp_path), {"CUDA_VISIBLE_DEVICES": shown})
        assert [gpu and gpu.address for gpu in found] == addresses

    def test_gpus_of_different_models_are_in_an_order_that_only_cuda_knows(self, tmp_path: Path) -> None:
        topology = host(tmp_path, gpus=GPUS | {"0000:1b:00.0": (1, "GPU-aaaa1111", "NVIDIA T400")})
        assert visible_gpus(topology, {}) == [None] * 4
        assert visible_gpus(topology, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})[1] == topology.gpus[1]
        assert visible_gpus(topology, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"})[0] == topology.gpus[1]  # named by itself

    @pytest.mark.parametrize("reason", ["too few GPUs", "unknown node", "no usable cores", "on the CPU"])
    def test_otherwise_ranks_are_bound_in_order(self, reason: str, tmp_path: Path) -> None:
        gpus = GPUS | ({"0000:1b:00.0": (-1, "GPU-a", H100)} if reason == "unknown node" else {})
        make_host(tmp_path, [range(8), range(8, 16)], gpus=gpus)
        topology = read_topology(tmp_path, range(8) if reason == "no usable cores" else range(16))
        num_ranks = 8 if reason == "too few GPUs" else 4
        found = seats(topology, "cores", num_ranks, {}, None if reason == "on the CPU" else "cuda")
        assert [core for seat in found for core in seat.cores] == sorted(core for seat in found for core in seat.cores)
        assert all(seat.gpu is None for seat in found)
        nodes = seats(topology, "node", 2, {"CUDA_VISIBLE_DEVICES": "0"}, "cuda")
        assert cores_of(nodes) == (["0-7", "0-7"] if reason == "no usable cores" else ["0-7", "8-15"])

    def test_too_few_cores_near_the_gpus_are_refused(self, tmp_path: Path) -> None:
        topology = host(tmp_path, [[0], [1, 2, 3]])
        with pytest.raises(ConfigError, match="2 ranks cannot share 1 cores of NUMA node 0, where their GPUs are"):
            seats(topology, "cores", 4, {}, "cuda")

    def test_a_kernel_that_tells_nothing(self, tmp_path: Path) -> None:
        assert read_topology(tmp_path, {2, 3}) == Topology({0: (2, 3)}, {2: 0, 3: 0}, {2: 2, 3: 3}, {2: 2, 3: 3})


class TestInOrder:
    @given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), num_ranks=st.integers(1, 12))
    def test_every_core_is_one_ranks(self, sizes: list[int], num_ranks: int) -> None:
        numbers = iter(range(sum(sizes)))
        nodes = {node: tuple(next(numbers) for _ in range(size)) for node, size in enumerate(sizes)}
        if num_ranks > sum(sizes):
            with pytest.raises(ConfigError, match="ranks cannot share"):
                share_cores(Topology(nodes), num_ranks)
            return
        parts = share_cores(Topology(nodes), num_ranks)
        assert len(parts) == num_ranks
        assert all(parts)
        assert [core for part in parts for core in part] == list(range(sum(sizes)))
        if len(set(sizes)) == 1 and num_ranks % len(sizes) == 0:
            assert all(any(set(part) <= set(node) for node in nodes.values()) for part in parts)

    @given(st.sets(st.integers(0, 300)))
    def test_lists_of_cores_are_the_kernel_s(self, cores: set[int]) -> None:
        assert parse_cores(format_cores(cores)) == sorted(cores)
        assert parse_cores("0-2,8\n") == [0, 1, 2, 8]


class TestVariables:
    def test_no_more_threads_than_cores_unless_chosen(self) -> None:
        most = len(os.sched_getaffinity(0))  # what one rank would get
        bound = [Seat(tuple(range(max(1, most - 1))))]
        given = bindings(1, {}, bound=bound)[0]
        assert given.get("OMP_NUM_THREADS", str(most)) == str(max(1, most - 1))
        assert bindings(1, {"OMP_NUM_THREADS": "9"}, bound=bound) == [{CORES: format_cores(bound[0].cores)}]
        assert "OMP_NUM_THREADS" not in bindings(1, {}, bound=bound, threads=9)[0]

    def test_a_dry_run_tells_the_cores_and_their_node(self) -> None:
        job = Job((__file__,), 1, bind="node")
        seat = Seat((8, 9, 10, 12), 1, Gpu("0000:1b:00.0", node=1))
        told = describe(job, True, bindings(1, {}, bound=[seat]), [seat])
        assert "rank 0 is bound to cores 8-10,12 of NUMA node 1, the node of GPU 0000:1b:00.0" in told
        assert "  SHARDWISE_CORES=8-10,12" in told

    @pytest.mark.parametrize(
        "option", ["--bind=cores", "--bind=node", "--numa-binding=exclusive", "--bind=socket", "--bind=core-complex"]
    )
    def test_the_launcher_s_own_dry_run(self, option: str, capsys: pytest.CaptureFixture[str]) -> None:
        (seat,) = seats(this_host(), {"exclusive": "cores"}.get(word := option.partition("=")[2], word), 1, {}, None)
        assert main(["launch", "--nproc", "1", option, "--dry-run", __file__]) == 0
        assert f"rank 0 is bound to {seat}" in capsys.readouterr().out

    def test_pods_whose_ranks_torchrun_starts(self) -> None:
        with pytest.raises(ConfigError, match="--bind node: in pods without --elastic, torchrun starts the ranks"):
            plan_k8s(Job((__file__,), 1, bind="node"), PodRequest("image"), {})
        elastic = Job((__file__,), 2, bind="node", elastic=Elastic(2, 4))
        assert "'--bind', 'node'" in str(plan_k8s(elastic, PodRequest("image"), {}).manifests)

    def test_places_that_bind_themselves(self) -> None:
        with pytest.raises(ConfigError, match=r"srun has no such binding\. Give one of cores, node, socket"):
            plan_srun(Job((__file__,), 1), SlurmRequest(bind="core-complex"), {}, {"SLURM_JOB_NODELIST": "n[1-2]"})
        step = plan_srun(Job((__file__,), 1), SlurmRequest(bind="node"), {}, {"SLURM_JOB_NODELIST": "n[1-2]"})
        assert "--cpu-bind=ldoms" in step.text()

    def test_an_unknown_binding_from_another_version_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="--bind is 'gpu'; give one of none, cores, node, socket"):
            Job((__file__,), 1, bind="gpu").check_numbers()
