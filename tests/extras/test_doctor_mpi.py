"""`shardwise doctor` with the `mpirun` and the library of Open MPI and of MPICH."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import test_mpi

import shardwise

pytestmark = test_mpi.pytestmark
EXAMINE = """
import json, sys
from dataclasses import asdict
from shardwise.cli.mpi import examine_mpi, mpi_facts
print("CHECKS", json.dumps([asdict(check) for check in examine_mpi(mpi_facts(), 100.0, sys.argv[1:])]))
"""
SETTINGS = {
    "openmpi": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_tcp_if_include": "lo",
    },
    "mpich": {"HYDRA_IFACE": "lo"},
}


def check(mpirun: str, library: str, *hosts: str, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The check of an environment whose `mpirun` and whose library are of these MPIs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "RANK"))}
    settings = {name: value for name, value in SETTINGS[mpirun].items() if name not in without}
    paths = [str(Path(shardwise.__file__).parents[1]), *filter(None, sys.path)]
    run = subprocess.run(
        [str(test_mpi.VENVS[library] / "bin" / "python"), "-c", EXAMINE, *hosts],
        env=inherited
        | settings
        | {
            "PATH": f"{test_mpi.VENVS[mpirun] / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(paths),
        },
        capture_output=True,
        text=True,
        timeout=test_mpi.SECONDS,
        check=False,
    )
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("CHECKS ")] or [run.stderr]
    (found,) = json.loads(line.removeprefix("CHECKS "))
    return dict(found)


@pytest.mark.parametrize(
    ("which", "told"),
    [
        ("openmpi", r"mpirun \(Open MPI\) 5\.[\d.]+ and mpi4py 4\S+ with Open MPI v5\S+"),
        ("mpich", r"MPICH \(Hydra\) 5\.[\d.]+ and mpi4py 4\S+ with MPICH Version: 5\S+"),
    ],
)
def test_two_ranks_exchange(which: str, told: str) -> None:
    found = check(which, which)
    assert (found["name"], found["status"]) == ("mpi", "ok"), found
    assert re.fullmatch(rf"{told}: rank 0 to rank 1 [\d.]+ .iB/s, \d+ us", found["found"]), found


@pytest.mark.parametrize("which", test_mpi.VENVS)
def test_one_rank_on_each_host(which: str) -> None:
    """Two names of this machine, which mpirun knows to be its own."""
    found = check(which, which, "127.0.0.1", "localhost")
    assert (found["name"], found["status"]) == ("mpi between hosts", "ok"), found
    assert "127.0.0.1 to localhost" in found["found"]


@pytest.mark.parametrize(("mpirun", "library"), [("openmpi", "mpich"), ("mpich", "openmpi")])
def test_an_mpirun_of_another_family(mpirun: str, library: str) -> None:
    found = check(mpirun, library)
    assert found["status"] == "warn", found
    assert "mpi4py uses another MPI" in found["found"]
    assert "MPI4PY_LIBMPI" in found["cure"]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, whom Open MPI refuses")
def test_open_mpi_refuses_root() -> None:
    found = check("openmpi", "openmpi", without=("OMPI_ALLOW_RUN_AS_ROOT",))
    assert found["status"] == "warn", found
    assert "run as root" in found["found"]
    assert "OMPI_ALLOW_RUN_AS_ROOT=1" in found["cure"]
