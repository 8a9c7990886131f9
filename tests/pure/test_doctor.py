"""The checks of `shardwise doctor`, from facts that are given as arguments."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest
from rich.console import Console

from shardwise.cli import checks, host_facts
from shardwise.cli.checks import Check
from shardwise.cli.console import waiting_for
from shardwise.cli.doctor import print_table
from shardwise.cli.loopback import LoopbackResult
from shardwise.system.machine import Cgroups, Gpu, Memory, TorchFacts, host_memory, num_cores

GIB = 2**30
GPU = Gpu("H100", 80 * GIB, 79 * GIB)
FULL = Gpu("L4", 9, 1)


@pytest.mark.parametrize(
    ("check", "status", "found"),
    [
        (checks.check_python((3, 10, 12)), "fail", "3.10.12"),
        (checks.check_python((3, 11, 0)), "ok", "3.11.0"),
        (
            checks.check_torch("No module named 'torch'"),
            "fail",
            "cannot be imported: No module named 'torch'",
        ),
        (checks.check_torch(TorchFacts("2.9.1+cu128", "CUDA 12.8")), "fail", "2.9.1+cu128, CUDA 12.8 build"),
        (checks.check_torch(TorchFacts("2.11.0a0+git1", "CPU")), "ok", "2.11.0a0+git1, CPU build"),
        (checks.check_torch(TorchFacts("3.0.0", "ROCm 7")), "ok", "3.0.0, ROCm 7 build"),
        (checks.check_cores(8, None), "ok", "8"),
        (checks.check_cores(8, 2.5), "ok", "8, of which the cgroup allows 2.5"),
        (checks.check_cores(8, 0.5), "warn", "8, of which the cgroup allows 0.5"),
        (checks.check_memory(Memory(8 * GIB, GIB // 2)), "warn", "512.0 MiB available of 8.0 GiB"),
        (checks.check_memory(Memory(8 * GIB, 4 * GIB)), "ok", "4.0 GiB available of 8.0 GiB"),
        (checks.check_shm(64 * 2**20, 60 * 2**20), "warn", "60.0 MiB free of 64.0 MiB"),
        (checks.check_shm(8 * GIB, 8 * GIB), "ok", "8.0 GiB free of 8.0 GiB"),
        (checks.check_shm(None, 0), "warn", "missing"),
        (checks.check_shared_memory(""), "ok", "processes can share it"),
        (checks.check_shared_memory("Permission denied"), "warn", "Permission denied"),
        (checks.check_allocator({}, "glibc"), "ok", "MALLOC_MMAP_THRESHOLD_ is not set"),
        (
            checks.check_allocator({"MALLOC_MMAP_THRESHOLD_": "1M"}, "glibc"),
            "warn",
            "MALLOC_MMAP_THRESHOLD_=1M",
        ),
        (checks.check_allocator({"MALLOC_MMAP_THRESHOLD_": "9"}, "glibc"), "ok", "MALLOC_MMAP_THRESHOLD_=9"),
        (checks.check_allocator({}, ""), "ok", "not glibc; MALLOC_MMAP_THRESHOLD_ does not apply"),
        (checks.check_threads({}, 4), "ok", "OMP_NUM_THREADS is not set"),
        (checks.check_threads({"OMP_NUM_THREADS": "4"}, 4), "ok", "OMP_NUM_THREADS=4"),
        (checks.check_threads({"OMP_NUM_THREADS": "64"}, 4), "warn", "OMP_NUM_THREADS=64"),
        (checks.check_threads({"OMP_NUM_THREADS": "all"}, 4), "warn", "OMP_NUM_THREADS=all"),
        (checks.check_backends(TorchFacts("2.13", "CPU")), "fail", "torch.distributed is missing"),
        (checks.check_backends(TorchFacts("2.13", "CPU", ("nccl",))), "warn", "nccl"),
        (checks.check_backends(TorchFacts("2.13", "CPU", ("gloo", "nccl"))), "ok", "gloo and nccl"),
        (checks.check_gpus(TorchFacts("2.13", "CPU")), "ok", "none; ranks use the CPU"),
        (checks.check_gpus(TorchFacts("2.13", "CUDA", ("gloo",), (GPU,))), "fail", "but no NCCL"),
        (
            checks.check_gpus(TorchFacts("2.13", "CUDA", ("nccl",), (GPU,))),
            "ok",
            "H100, 79.0 GiB free",
        ),
        (
            checks.check_gpus(TorchFacts("2.13", "CUDA", ("nccl",), (Gpu("L4", 9, 1),))),
            "warn",
            "L4, 1 B free",
        ),
        (
            checks.check_gpus(TorchFacts("2.13", "CUDA", gpu_trouble="driver too old")),
            "fail",
            "driver too old",
        ),
        (checks.check_loopback(LoopbackResult(1.0, "rank 1 ended")), "fail", "rank 1 ended"),
        (checks.check_loopback(LoopbackResult(1.5)), "ok", "two processes connected and summed in 1.5 s"),
        (checks.check_temp("/tmp", False, 0), "fail", "/tmp cannot be written"),
        (checks.check_temp("/tmp", True, 5), "warn", "/tmp, 5 B free"),
        (checks.check_temp("/tmp", True, GIB), "ok", "/tmp, 1.0 GiB free"),
    ],
)
def test_a_check_and_its_cure(check: Check, status: str, found: str) -> None:
    assert_cured(check, status, found)


def assert_cured(check: Check, status: str, found: str) -> None:
    """It has this status and finding; and a cure, unless all is well."""
    assert check.status == status
    assert found in check.found
    assert check.cure or check.status == "ok"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_limits_of_control_groups_version_2(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/pod/box\n")
    pod = tmp_path / "fs" / "pod"
    write(pod, cpu__max="150000 100000\n", memory__max="4000\n", memory__current="3500\n")
    write(pod, memory__stat="anon 3\ninactive_file 700\n")
    write(pod / "box", cpu__max="max 100000\n", memory__max="max\n", memory__current="100\n")
    cgroups = Cgroups(tmp_path / "fs", tmp_path / "membership")
    assert cgroups.cpu_limit() == 1.5
    assert cgroups.memory(Memory(10_000, 9_000)) == Memory(4000, 1200)
    assert cgroups.memory(Memory(3_000, 2_000)) == Memory(3_000, 2_000)


def test_limits_of_control_groups_version_1(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("9:cpu,cpuacct:/box\n8:memory:/box\n1:name=systemd:/\n")
    root = tmp_path / "fs"
    write(root / "cpu" / "box", cpu__cfs_quota_us="50000\n", cpu__cfs_period_us="100000\n")
    write(root / "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    write(
        root / "memory" / "box",
        memory__limit_in_bytes="4000\n",
        memory__usage_in_bytes="4100\n",
        memory__stat="total_inactive_file 50\n",
    )
    cgroups = Cgroups(root, tmp_path / "membership")
    assert cgroups.cpu_limit() == 0.5
    assert cgroups.memory(Memory(10_000, 9_000)) == Memory(4000, 0)


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    cgroups = Cgroups(tmp_path, tmp_path / "nothing")
    assert cgroups.cpu_limit() is None
    assert cgroups.memory(Memory(2, 1)) == Memory(2, 1)


def test_this_machine_has_cores_and_memory() -> None:
    memory = Cgroups().memory(host_memory())
    assert num_cores() >= 1
    assert 0 <= memory.available_bytes <= memory.total_bytes


def test_the_table_shows_every_answer_and_counts_failures() -> None:
    answers = [Check("one", "ok", "fine"), Check("two", "fail", "[brackets] stay", "mend it")]
    page = io.StringIO()
    print_table(answers, Console(file=page, width=80))
    text = page.getvalue()
    assert "[brackets] stay" in text
    assert "mend it" in text
    assert "1 of 2 checks failed." in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_is_told_what_is_waited_for(is_terminal: bool) -> None:
    shown = io.StringIO()
    with waiting_for("torch [cpu]", Console(file=shown, force_terminal=is_terminal, width=80)):
        pass
    assert ("waiting for torch [cpu] ..." in shown.getvalue()) == is_terminal
    assert bool(shown.getvalue()) == is_terminal


def test_a_slow_disk_is_measured_with_fewer_bytes(tmp_path: Path) -> None:
    """Every look at the clock finds another second gone."""
    seconds = itertools.count()
    rates = host_facts.disk_rates(tmp_path, 2**30, clock=lambda: float(next(seconds)))
    assert 0 < rates.write < 2**23
    assert 0 < rates.read < 2**23


@pytest.mark.parametrize(("ratio", "said"), [(45.2, "45 times"), (0.16, "0.16 times")])
def test_bf16_is_said_to_be_slow_where_it_is(ratio: float, said: str) -> None:
    check = checks.check_bf16(ratio)
    assert (check.name, check.status) == ("processor", "ok")
    assert said in check.found
    assert ("precision: auto" in check.cure) == (ratio > 1)
