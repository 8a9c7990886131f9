"""Horovod's calls on shardwise, beside torch's gloo in the same job and Horovod itself in jobs that take turns."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.figures import Figures, read_figures
from benchmarks.fresh import ROOT, RunError, environment, run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.system.units import format_bytes

RANKS = 2
MODULE = "benchmarks.horovod_rank"
OURS, PEER, GLOO = "shardwise", "horovod", "gloo"
SECONDS = 300


def main(args: argparse.Namespace, console: Console) -> int:
    """1 if a loop of Horovod's own came to other losses."""
    rounds = 1 if args.quick else 3
    options = [f"--largest={2**20 if args.quick else 64 * 2**20}"]
    result: dict[str, Any] = header(args.note) | {"benchmark": "horovod", "runs": []}
    peer = _peer()
    if peer is None:
        console.print("Horovod is not installed in this environment, and is left out.")
    for _ in range(rounds):
        result["runs"].append({"side": OURS, **run_ranks(MODULE, options, num_ranks=RANKS, timeout_seconds=SECONDS)[0]})
        if peer is not None:
            result["runs"].append({"side": PEER, **_run_peer(peer, options)})
    file = write_result(args.out / "horovod.json", result)
    _show(result["runs"], console)
    console.print(f"\n{file}", markup=False)
    losses = [run["losses"] for run in result["runs"]]
    return 0 if all(_agree(one, losses[0]) for one in losses) else 1


def _peer() -> Path | None:
    """Horovod's launcher; PyPI's 0.28.1 is built for torch 2.13 after `CMAKE_CXX_STANDARD 14` was made 20."""
    launcher = Path(sys.executable).parent / "horovodrun"
    return launcher if importlib.util.find_spec("horovod") is not None and launcher.exists() else None


def _run_peer(launcher: Path, options: list[str]) -> Figures:
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        command = [str(launcher), "--gloo", "-np", str(RANKS), sys.executable, "-m", MODULE, "--side", PEER]
        done = subprocess.run(
            [*command, *options, "--out", folder],
            env={**environment(on_cpu=True), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        figures = read_figures(Path(folder), RANKS)
    if done.returncode != 0 or not all(figures):
        raise RunError(f"horovodrun ended with status {done.returncode}: {done.stderr[-300:]}")
    return figures[0]


def _agree(losses: list[float], first: list[float]) -> bool:
    return all(abs(one - other) <= 1e-5 * abs(other) for one, other in zip(losses, first, strict=True))


def _show(runs: list[dict[str, Any]], console: Console) -> None:
    names = list(runs[0]["seconds"][OURS])
    rows = []
    for name in names:
        times = {side: _median(runs, side, name) for side in (OURS, GLOO, PEER)}
        label = format_bytes(int(name)) if name.isdigit() else name
        shown = ["-" if time is None else f"{1000 * time:.2f}" for time in times.values()]
        ours = times[OURS]
        ratios = ["-" if time is None or not ours else f"{time / ours:.2f}" for time in (times[GLOO], times[PEER])]
        rows.append([label, *shown, *ratios])
    columns = ["all-reduce", "ours ms", "gloo ms", "horovod ms", "gloo / ours", "horovod / ours"]
    show_figures(f"Horovod's calls, fp32, {RANKS} ranks: medians", columns, rows, console)


def _median(runs: list[dict[str, Any]], side: str, name: str) -> float | None:
    found = [run["seconds"][side][name] for run in runs if name in run["seconds"].get(side, {})]
    return median(found) if found else None
