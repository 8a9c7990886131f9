"""Real `mpirun` of Open MPI and MPICH: torch's collectives and our engine over MPI, and the end of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mpi_jobs
import pytest
import torch
from rank_processes import on_ranks

from tests.thorough import soak

ROOT = Path(__file__).parents[2]
VENVS = {
    "openmpi": Path(os.environ.get("OPENMPI_VENV", ROOT / ".venv-openmpi")),
    "mpich": Path(os.environ.get("MPICH_VENV", ROOT / ".venv-mpich")),
}
LOOPBACK = ["--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "lo"]
OPTIONS = {"openmpi": ["--allow-run-as-root", "--oversubscribe", *LOOPBACK], "mpich": ["-iface", "lo"]}
JOBS = Path(__file__).with_name("mpi_jobs.py")
SECONDS = 150

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not all((venv / "bin" / "mpirun").exists() for venv in VENVS.values()),
        reason="needs .venv-openmpi and .venv-mpich, which `make extras` installs",
    ),
]


def mpirun(
    which: str, size: int, *command: str, python: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`mpirun -np SIZE python COMMAND` of one of the two, by default with the `python` of its environment."""
    folder = VENVS[which] / "bin"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "RANK"))}
    given = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SHARDWISE_SHARED_MEMORY": "0"}
    return subprocess.run(
        [str(folder / "mpirun"), *OPTIONS[which], "-np", str(size), python or str(folder / "python"), *command],
        env=inherited | given | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        check=False,
        cwd=ROOT,
    )


def told(folder: Path, size: int) -> list[Any]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]


def fold(name: str, folder: Path) -> None:
    """A job of `mpi_jobs` on ranks with torch's own variables."""
    os.environ["SHARDWISE_SHARED_MEMORY"] = "0"
    getattr(mpi_jobs, name)(folder)


@pytest.mark.parametrize("which", VENVS)
def test_every_collective_of_torch_and_ddp(which: str, tmp_path: Path) -> None:
    run = mpirun(which, 3, str(JOBS), "backend", str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert told(tmp_path, 3) == ["done"] * 3


@pytest.mark.parametrize(
    ("which", "size", "environment"), [("openmpi", 4, {}), ("mpich", 2, {"MPI4PY_RC_THREAD_LEVEL": "funneled"})]
)
def test_engines_by_mpi_are_those_by_gloo_to_the_bit(
    which: str, size: int, environment: dict[str, str], tmp_path: Path
) -> None:
    """With all threads calling MPI, and with only one; a checkpoint is resumed under another launcher."""
    run = mpirun(which, size, str(JOBS), "engines", str(tmp_path), **environment)
    assert run.returncode == 0, run.stderr
    found = told(tmp_path, size)
    assert [one.pop("transport") for one in found] == ["MPI"] * size
    gloo = tmp_path / "gloo"
    gloo.mkdir()
    on_ranks(size, fold, "engines", gloo)
    expected = told(gloo, size)
    assert [one.pop("transport") for one in expected] == ["gloo"] * size
    assert found == expected
    on_ranks(6 - size, fold, "resumed", tmp_path)
    assert told(tmp_path, 1)[0] == expected[0]["zero3"][1]


@pytest.mark.parametrize("which", VENVS)
def test_a_rank_that_raises_ends_the_job(which: str, tmp_path: Path) -> None:
    """All ranks print the reason; none waits in MPI_Finalize."""
    started = time.monotonic()
    run = mpirun(which, 2, str(JOBS), "faulty", str(tmp_path), FAULT="raises")
    assert run.returncode == 1, run.stderr
    assert "ValueError: a bad batch" in run.stderr
    assert "FaultError: Rank 1 raised ValueError: a bad batch" in run.stderr
    assert time.monotonic() - started < 100


@soak("mpirun sends SIGKILL soon after SIGTERM: 0.2 s on a busy machine, and PRRTE has no setting for it")
def test_a_rank_that_is_killed_is_named_by_the_others(tmp_path: Path) -> None:
    run = mpirun("openmpi", 2, str(JOBS), "faulty", str(tmp_path), FAULT="killed")
    assert run.returncode == 137, run.stderr
    assert "Rank 1 is gone without a word" in run.stderr


def test_a_collective_that_one_rank_does_not_come_to(tmp_path: Path) -> None:
    """Without a `World`: the rank that raises ends the one that sleeps."""
    run = mpirun("openmpi", 2, str(JOBS), "absent", str(tmp_path))
    assert run.returncode == 1, run.stderr
    assert "Rank 0 waited 2 s in all_reduce of group" in run.stderr


@pytest.mark.parametrize(
    ("which", "python", "words"),
    [
        ("openmpi", None, "Messages by MPI need mpi4py, which is not installed: pip install 'shardwise[mpi]'"),
        ("openmpi", "mpich", "mpirun of Open MPI started this process (OMPI_COMM_WORLD_RANK="),
        ("mpich", "openmpi", "of PMI_SIZE=2), but mpi4py uses another MPI, Open MPI v5"),
    ],
    ids=["no mpi4py", "MPICH under Open MPI", "Open MPI under MPICH"],
)
def test_an_mpi_that_is_missing_or_another_one(which: str, python: str | None, words: str) -> None:
    path = sys.executable if python is None else str(VENVS[python] / "bin" / "python")
    run = mpirun(which, 2, "-c", "import shardwise; shardwise.World.join()", python=path)
    assert run.returncode != 0
    assert "ConfigError: " in run.stderr
    assert words in run.stderr


def test_the_main_job(tmp_path: Path) -> None:
    """Started as users do."""
    small = "--set precision=fp32 --layers 2 --width 32 --heads 2 --context 32 --batch 4"
    options = ["--plan", "zero3", "--steps", "2", "--out", str(tmp_path), *small.split()]
    run = mpirun("mpich", 2, "examples/stdlib_gpt/train.py", *options, SHARDWISE_SHARED_MEMORY="1")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "checkpoints").is_dir()


def test_narrow_numbers_are_rounded_once() -> None:
    from shardwise.comm.transport.mpi.algorithms import combined

    terms = [torch.tensor([256.0, 1.0], dtype=torch.bfloat16), *[torch.ones(2, dtype=torch.bfloat16)] * 4]
    assert combined(terms, "SUM").to(torch.bfloat16).tolist() == [260.0, 5.0]
    assert sum(terms).tolist() != [260.0, 5.0]  # type: ignore[union-attr]
