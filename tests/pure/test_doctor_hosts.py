"""The checks of `shardwise doctor`: limits, networks, disks, plans, several hosts. Faulty ones are arguments."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import host_checks, host_facts
from shardwise.cli.checks import Check
from shardwise.cli.host_facts import DiskRates, Leftovers
from shardwise.cli.main import main
from shardwise.cli.plan_lint import lint
from shardwise.cli.remote import Remote
from shardwise.cli.several_hosts import (
    Probe,
    check_folders,
    check_links,
    check_reachable,
    check_same_versions,
    check_skew,
    measure_links,
)
from shardwise.cli.several_hosts import probe as ask_host
from shardwise.launch.hosts.facts import Interface, interface_of, interfaces, versions
from shardwise.system.machine import Gpu, TorchFacts
from tests.patience import PATIENCE
from tests.pure.test_doctor import assert_cured

GIB = 2**30
LO, ETH = Interface("lo", "127.0.0.1", 0), Interface("eth0", "10.0.0.2", 25000)
CPU = TorchFacts("2.13", "CPU", ("gloo",))
CUDA = TorchFacts("2.13", "CUDA 12.8", ("gloo", "nccl"), (Gpu("H100", 80 * GIB, 79 * GIB),))
HOSTS = ("a", "b", "c")


def probe(host: str, **facts: Any) -> Probe:
    versions = {"python": "3.11.7", "torch": "2.13.0", **facts.get("versions", {})}
    return Probe(host, {"versions": versions, "folders": facts.get("folders", {})})


def link(rate: float, skew: float = 0.0) -> dict[str, float]:
    return {"from": 0, "to": 2, "latency": 1e-4, "rate": rate, "skew": skew}


@pytest.mark.parametrize(
    ("check", "status", "found"),
    [
        (host_checks.check_limits({"open files": 128}, has_rdma=False), "fail", "open files 128"),
        (host_checks.check_limits({"open files": 1024}, has_rdma=False), "warn", "open files 1024"),
        (host_checks.check_limits({"open files": -1, "locked memory": 64}, has_rdma=True), "warn", "locked memory 64"),
        (host_checks.check_limits({"open files": -1, "locked memory": 64}, has_rdma=False), "ok", "unlimited"),
        (host_checks.check_network([LO], "", {}), "ok", "only loopback"),
        (host_checks.check_network([LO, ETH], "10.0.0.2", {}), "ok", "eth0 10.0.0.2 25000 Mbit/s"),
        (host_checks.check_network([LO, ETH], "", {}), "warn", "name does not resolve"),
        (host_checks.check_network([LO, ETH], "127.0.1.1", {}), "ok", "name resolves to 127.0.1.1"),
        (host_checks.check_network([LO, ETH], "", {"GLOO_SOCKET_IFNAME": "eth0"}), "ok", "GLOO_SOCKET_IFNAME=eth0"),
        (host_checks.check_network([LO, ETH], "", {"GLOO_SOCKET_IFNAME": "ib0"}), "fail", "GLOO_SOCKET_IFNAME=ib0"),
        (host_checks.check_driver("", CPU), "ok", "no NVIDIA driver"),
        (host_checks.check_driver("570.1", CPU), "warn", "but torch is a CPU build"),
        (host_checks.check_driver("570.1", TorchFacts("2.13", "CUDA 12.8")), "warn", "torch sees no GPU"),
        (host_checks.check_driver("570.1", CUDA), "ok", "NVIDIA 570.1"),
        (host_checks.check_clock(None), "ok", "unknown"),
        (host_checks.check_clock(False), "warn", "not synchronized"),
        (host_checks.check_clock(True), "ok", "synchronized"),
        (host_checks.check_disk("/data", "No space left on device"), "fail", "No space left"),
        (host_checks.check_disk("/data", DiskRates(9e6, 9e9)), "warn", "writes 8.6 MiB/s"),
        (host_checks.check_disk("/data", DiskRates(9e9, 9e9)), "ok", "reads 8.4 GiB/s"),
        (host_checks.check_versions([]), "ok", "all requirements are met"),
        (host_checks.check_versions(["torch is 2.9, and >=2.11 is needed"]), "warn", "torch is 2.9"),
        (host_checks.check_versions(["psutil is not installed"]), "fail", "psutil"),
        (host_checks.check_leftovers(Leftovers()), "ok", "none"),
        (host_checks.check_leftovers(Leftovers(orphans=(7, 9))), "warn", "ranks without a launcher: 7 9"),
        (host_checks.check_leftovers(Leftovers(shared=(Path("/x"),), shared_bytes=2 * GIB)), "warn", "1 files"),
        (host_checks.check_leftovers(Leftovers((Path("/tmp/shardwise-x"),))), "ok", "/tmp/shardwise-x"),
        (check_reachable([probe("a"), probe("b")]), "ok", "reached a, b"),
        (check_reachable([probe("a"), Probe("b", trouble="timed out")]), "fail", "b: timed out"),
        (check_reachable([Probe("b", trouble="something new")]), "fail", "b: something new"),
        (check_same_versions([probe("a"), probe("b")]), "ok", "torch 2.13.0"),
        (check_same_versions([probe("a"), probe("b", versions={"python": "3.11.9"})]), "ok", "python 3.11.7"),
        (
            check_same_versions([probe("a"), probe("b", versions={"torch": "2.12.0"})]),
            "fail",
            "torch is 2.13.0 on a, 2.12.0 on b",
        ),
        (check_folders([probe("a", folders={"/d": True})]), "ok", "/d on all hosts"),
        (
            check_folders([probe("a", folders={"/d": True}), probe("b", folders={"/d": False})]),
            "fail",
            "missing or not writable: /d on b",
        ),
        (check_links(HOSTS, [link(1e10)]), "ok", "a to c 9.3 GiB/s, 100 us"),
        (check_links(HOSTS, [link(1e7), link(1e10)]), "warn", "a to c 9.5 MiB/s"),
        (check_links(HOSTS, "no connection"), "fail", "no connection"),
        (check_skew(HOSTS, [link(1, 0.1), link(1, -4.0)]), "warn", "at most 4.0 s, a and c"),
        (check_skew(HOSTS, [link(1, 0.1)]), "ok", "at most 100 ms"),
    ],
)
def test_a_check_and_its_cure(check: Check, status: str, found: str) -> None:
    assert_cured(check, status, found)


@pytest.mark.parametrize(
    ("plan", "world", "facts", "name", "words"),
    [
        ("preset: zero4\n", 2, CPU, "plan", "zero4"),
        ("preset: zero3\nprecison: bf16\n", 2, CPU, "plan", "precision"),
        ("mesh: {dp: 3}\n", 2, CPU, "plan", "dp=3"),
        ("precision: fp16\n", 2, CPU, "plan precision", "fp16 without a GPU"),
        ("preset: ddp\n", 64, CPU, "plan ranks", "64 ranks, but this machine has 4 cores"),
        ("preset: ddp\n", 2, CUDA, "plan ranks", "2 ranks, but this machine has 1 GPUs"),
        ("trackers: [jsonl]\n", 2, CPU, "plan trackers", "need a folder"),
        ("profile: {steps: [1, 2]}\n", 2, CPU, "plan profile", "no folder for traces"),
        ("run: HERE/plan.yaml/run\n", 2, CPU, "plan run", "plan.yaml/run cannot be written"),
        ("disk: HERE/plan.yaml/tier\n", 2, CPU, "plan disk", "cannot be written"),
        ("disk: $NOT_SET_HERE/tier\n", 2, CPU, "plan disk", "not all of its variables are set"),
        ("preset: infinity\n", 2, CPU, "plan disk", "no folder for what is on a disk (row optim)"),
        ("activations: disk\n", 2, CPU, "plan disk", "no folder for what is on a disk (activations)"),
        ("offload: {optim: 0.5, optim_disk: 0.25}\n", 2, CPU, "plan disk", "(offload.optim_disk)"),
        (
            "rules: {r: {params: ['*'], rows: {optim: {tier: disk}, grad: {tier: host}}}}\n",
            2,
            CPU,
            "plan disk",
            "(rule r)",
        ),
        (
            "preset: infinity\ndisk: HERE\nbudget: {device: 1GiB}\n",
            2,
            CPU,
            "plan",
            "its rows have the states of all units on the disk",
        ),
        ("preset: zero3\nbudget: {host: 1GiB}\n", 2, CPU, "plan", "give budget.device too"),
        ("preset: infinity\ndisk: HERE\noffload: {optim: 0.5}\n", 2, CPU, "plan", "Leave out offload"),
        ("preset: infinity\ndisk: HERE/run\n", 2, CPU, "plan", "on 2 ranks"),
        ("preset: zero3\nrun: HERE/run\ntrackers: [jsonl]\n", 4, CPU, "plan", "on 4 ranks"),
    ],
)
def test_a_plan_is_looked_through(
    plan: str, world: int, facts: TorchFacts, name: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(plan.replace("HERE", str(tmp_path)))
    (check,) = lint(str(path), world, facts, num_cores=4)
    assert check.name == name
    assert words in check.found
    assert check.cure or check.status == "ok"


def test_versions_that_do_not_fit_are_named() -> None:
    asked = ("pytest>=2", "pytest<3,>=2; extra == 'test'", "no-such-thing", "no-such-thing; extra == 'x'", "pytest!=1")
    first, second = host_facts.conflicts(asked)
    assert first.startswith("pytest is ")
    assert first.endswith("<3,>=2 is needed")
    assert second == "no-such-thing is not installed"


def test_leftovers_of_dead_jobs_are_found(tmp_path: Path) -> None:
    for name in ("shardwise-dead", "shardwise-alive", "shardwise-other"):
        (tmp_path / name).mkdir()
    for name in ("dead", "alive"):
        (tmp_path / f"shardwise-{name}" / "launcher.lock").touch()
    (tmp_path / f"torch_{2**22 + 1}_1_0").write_bytes(b"x" * 10)  # no process has so high a number
    (tmp_path / f"torch_{os.getpid()}_1_0").write_bytes(b"x")
    with (tmp_path / "shardwise-alive" / "launcher.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        left = host_facts.leftovers(tmp_path, tmp_path)
    assert left.folders == (tmp_path / "shardwise-dead",)
    assert left.shared == (tmp_path / f"torch_{2**22 + 1}_1_0",)
    assert left.shared_bytes == 10


def test_facts_of_this_machine(tmp_path: Path) -> None:
    rates = host_facts.disk_rates(tmp_path, 2**20)
    assert rates.write > 0 < rates.read
    assert list(tmp_path.iterdir()) == []
    assert "127.0.0.1" in {one.address for one in interfaces() if one.is_ipv4}
    assert interface_of("127.0.0.1") == "lo"
    assert list(versions()) == ["python", "shardwise", "torch", "numpy", "safetensors"]
    assert host_facts.limits()["open files"] != 0
    assert host_facts.clock_is_synchronized() in (True, False, None)
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n")
    assert host_facts.driver_version(version) == "570.86.15"
    assert host_facts.driver_version(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a,b,a"], "names a host twice"),
        (["--hosts=-oProxyCommand=x,b"], "is an option, not a host"),
        (["--hosts", "a", "--ssh", ""], "--ssh: this machine has no command ''"),
        (["--hosts", "a", "--ssh", "no-such-command -p 1"], "--ssh: this machine has no command 'no-such-command'"),
        (["--hosts", "a", "--ssh", "ssh 'x"], "cannot be read: No closing quotation"),
        (["--hosts", "a", "--ssh", "sh", "--port", "99999"], "--port is 99999; give a number from 1 to 65535"),
        (["--world", "4"], "--world 4 is the number of ranks for --plan"),
        (["--port", "4000"], "--port 4000 is a port of the first host of --hosts"),
        (["--timeout", "0"], "give more than 0 seconds"),
    ],
)
def test_hosts_that_cannot_be_meant_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


GREETING_SHELL = """#!/bin/sh
printf 'Sch\\366nen Tag\\n'
case "$2" in
*host_probe*) echo '{"host": "a", "versions": {}, "folders": {}}' ;;
*) echo 'PORT 5'; echo 'RESULT [{"from": 0, "to": 1, "rate": 1e9, "latency": 1e-4, "skew": 0.0}]' ;;
esac
"""


def test_what_a_login_script_prints_is_ignored(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 ended doctor, and any line at all was taken for the answer of the first host."""
    shell = tmp_path / "shell"
    shell.write_text(GREETING_SHELL)
    shell.chmod(0o755)
    remote = Remote((str(shell),), timeout_seconds=PATIENCE)
    assert ask_host("a", remote, []).facts["host"] == "a"
    rows = measure_links(["a", "b"], remote, 0)
    assert not isinstance(rows, str), rows
    assert rows[0]["rate"] == 1e9
