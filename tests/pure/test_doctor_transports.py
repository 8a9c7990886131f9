"""What `shardwise doctor` says about NCCL and MPI. GPUs, hosts and broken MPIs are made up; real MPIs are in
`tests/extras/test_doctor_mpi.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.checks import Check
from shardwise.cli.mpi import MpiFacts, check_exchange, check_installed, examine_mpi, mpi_facts
from shardwise.cli.nccl import check_all_reduce, check_nccl, examine_gpus, examine_nccl
from shardwise.cli.nccl_facts import matching_interfaces
from shardwise.cli.remote import Remote
from shardwise.launch.hosts.facts import Interface
from shardwise.system.machine import TorchFacts
from tests.patience import PATIENCE
from tests.pure.test_doctor import assert_cured

LO, ETH = Interface("lo", "127.0.0.1", 0), Interface("eth0", "10.0.0.2", 25000)
CUDA = TorchFacts("2.13", "CUDA 12.8", ("gloo", "nccl"), nccl="2.27.3")
ROW = {"from": 0, "to": 1, "latency": 2e-5, "rate": 2e11}
HOSTS = ("a", "b")
OPEN_MPI = MpiFacts("/bin/mpirun", "mpirun (Open MPI) 5.0.8\n\nReport bugs", mpi4py="4.1")
HYDRA = MpiFacts("/bin/mpirun", "HYDRA build details:\n    Version:        5.0.2\n    CC: gcc", mpi4py="4.1")


def rank(**facts: Any) -> dict[str, Any]:
    return {"nccl": "2.27.3", "gpus": 8, "interfaces": ["eth0", "lo"], "chosen": ""} | facts


def reduced(*facts: dict[str, Any], **row: float) -> Check:
    """The check after ranks with these facts; they measured only if nothing spoke against it."""
    return check_all_reduce("nccl between hosts", HOSTS, {"facts": list(facts), "rows": [ROW | row]}, 2**30)


@pytest.mark.parametrize(
    ("check", "status", "found"),
    [
        (check_nccl(CUDA, [LO, ETH], {}), "ok", "NCCL 2.27.3"),
        (
            check_nccl(CUDA, [LO, ETH], {"NCCL_SOCKET_IFNAME": "^docker,lo"}),
            "ok",
            "NCCL_SOCKET_IFNAME=^docker,lo is eth0",
        ),
        (check_nccl(CUDA, [LO, ETH], {"NCCL_SOCKET_IFNAME": "ib"}), "fail", "NCCL_SOCKET_IFNAME=ib"),
        (reduced(rank(), rank()), "ok", "NCCL 2.27.3, all-reduce of each pair: a to b 186.3 GiB/s, 20 us"),
        (reduced(rank(), rank(), rate=1e8), "warn", "a to b 95.4 MiB/s"),
        (reduced(rank(), rank(nccl="2.26.2")), "fail", "different versions of NCCL: 2.27.3 on a, 2.26.2 on b"),
        (reduced(rank(), rank(nccl="")), "fail", "torch has no NCCL on b"),
        (reduced(rank(nccl=""), rank(nccl="")), "warn", "torch has no NCCL on a, b"),
        (reduced(rank(gpus=0), rank()), "fail", "torch sees no GPU on a"),
        (reduced(rank(), rank(chosen="ib0")), "fail", "NCCL_SOCKET_IFNAME=ib0 names no interface of b"),
        (
            check_all_reduce("nccl", HOSTS, "b: socketStartConnect: refused", 1),
            "fail",
            "b: socketStartConnect: refused",
        ),
        (check_installed(MpiFacts()), "ok", "no mpirun"),
        (check_installed(MpiFacts(mpi4py="4.1")), "warn", "mpi4py 4.1, but no mpirun or mpiexec"),
        (check_installed(MpiFacts("/bin/mpirun", HYDRA.version)), "ok", "MPICH (Hydra) 5.0.2, without mpi4py"),
        (check_installed(MpiFacts("/bin/mpirun", trouble="it does not end")), "warn", "/bin/mpirun --version"),
        (
            check_exchange("mpi", OPEN_MPI, HOSTS, {"library": "Open MPI v5.0.8", "rows": [ROW]}),
            "ok",
            "mpirun (Open MPI) 5.0.8 and mpi4py 4.1 with Open MPI v5.0.8: a to b 186.3 GiB/s, 20 us",
        ),
        (check_exchange("mpi between hosts", HYDRA, HOSTS, "it did not start within 30 s"), "warn", "within 30 s"),
        (check_exchange("mpi between hosts", HYDRA, HOSTS, "mpirun ended with status 255"), "warn", "status 255"),
    ],
)
def test_a_check_and_its_cure(check: Check, status: str, found: str) -> None:
    assert_cured(check, status, found)


@pytest.mark.parametrize(
    ("chosen", "used"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth0,ib0", ["eth0", "ib0"]),
        ("^eth,lo", ["docker0", "ib0"]),
        ("^=eth0", ["docker0", "eth1", "ib0", "lo"]),
        ("mlx5", []),
    ],
)
def test_names_of_interfaces_are_meant_as_nccl_means_them(chosen: str, used: list[str]) -> None:
    assert matching_interfaces(chosen, ["docker0", "eth0", "eth1", "ib0", "lo"]) == used


def test_nccl_is_tried_only_where_all_have_gpus() -> None:
    unused = Remote(("/nowhere",))
    assert list(examine_nccl(HOSTS, {"a": False, "b": False}, unused, 0)) == []
    (check,) = examine_nccl(HOSTS, {"a": True, "b": False}, unused, 0)
    assert (check.status, check.found) == ("fail", "no GPU on b")
    assert list(examine_gpus(1, 1.0)) == []


class TestMpirun:
    """With scripts in the place of `mpirun`, and the real program of a rank, which finds no mpi4py here."""

    def facts(self, folder: Path, body: str, monkeypatch: pytest.MonkeyPatch, name: str = "mpirun") -> MpiFacts:
        starter = folder / name
        starter.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "mpirun (Open MPI) 5.0"; exit; fi\n{body}\n')
        starter.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        found = mpi_facts()
        assert found.starter == str(starter)
        return MpiFacts(found.starter, found.version, found.trouble, found.mpi4py or "4.1")

    @pytest.mark.parametrize(
        ("body", "found", "cure"),
        [
            (
                "echo -----; echo mpirun has detected an attempt to run as root. >&2; exit 1",
                "as root",
                "ALLOW_RUN_AS_ROOT",
            ),
            (
                "echo PRTE ERROR: not found >&2; echo ------- >&2; exit 213",
                "status 213: PRTE ERROR",
                "Start it by hand",
            ),
            (
                "echo 'TROUBLE mpirun of X, but Y. Use the mpirun of Y.'; exit 1",
                "mpirun of X, but Y.",
                "Use the mpirun of Y.",
            ),
            ("sleep 600 & wait", "within 2 s", "Start it by hand"),
        ],
    )
    def test_what_does_not_start(
        self, body: str, found: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        facts = self.facts(tmp_path, body, monkeypatch)
        (check,) = examine_mpi(facts, 2.0 if body.startswith("sleep") else PATIENCE)
        assert (check.name, check.status) == ("mpi", "warn")
        assert found in check.found
        assert cure in check.cure

    def test_what_it_is_told_to_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = self.facts(tmp_path, 'echo "RESULT {\\"library\\": \\"$*\\", \\"rows\\": []}"', monkeypatch, "mpiexec")
        (check,) = examine_mpi(facts, PATIENCE, ["me@a", "b"])
        assert check.name == "mpi between hosts"
        assert "-np 2 --host a:1,b:1 --bind-to none" in check.found
        assert f"{sys.executable} -m shardwise.cli.mpi_rank" in check.found

    def test_a_broken_mpirun(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mpirun").write_text("#!/bin/sh\necho libprrte.so: cannot open shared object file >&2; exit 127\n")
        (tmp_path / "mpirun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
        (check,) = examine_mpi(mpi_facts(), PATIENCE)
        assert check.status == "warn"
        assert "status 127: libprrte.so: cannot open shared object file" in check.found
        assert list(examine_mpi(mpi_facts(), 1.0, HOSTS)) == []
