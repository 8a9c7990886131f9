"""What more ranks cost each rank, and what it costs to begin: importing, and starting a job of two."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.fresh import ROOT, RunError, environment, launcher, run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.show import show_figures
from benchmarks.summary import Run

RANKS = (1, 2, 4)
ENGINE = "shardwise-zero3"
# `import shardwise` by itself imports next to nothing: names come when they are first used.
IMPORTS = {"torch": "import torch", "torch and shardwise": "import torch; from shardwise import shard"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def main(args: argparse.Namespace, console: Console) -> int:
    size, num_rounds, steps = ("tiny", 2, 4) if args.quick else ("small", 3, 4)
    result: dict[str, Any] = header(args.note) | {"benchmark": "growth", "size": size, "engine": ENGINE}
    result["ranks"] = _growth(size, num_rounds, steps)
    result["import_seconds"] = _medians({name: _import(code) for name, code in IMPORTS.items()}, 3 if args.quick else 7)
    result["start_seconds"] = _medians(
        {"shardwise launch": _start([*launcher(2), "-m"]), "torchrun": _start([*TORCHRUN, "-m"])}, num_rounds
    )
    file = write_result(args.out / "growth.json", result)
    _show(result, console)
    console.print(f"\n{file}", markup=False)
    return 0


def _growth(size: str, num_rounds: int, steps: int) -> list[dict[str, Any]]:
    """By number of ranks: the medians over rounds of what one rank takes, with the same micro-batch each."""
    runs: dict[str, list[Run]] = {str(num_ranks): [] for num_ranks in RANKS}
    for number, num_ranks in interleaved(list(runs), num_rounds):
        options = [f"--engine={ENGINE}", f"--size={size}", "--dtype=fp32", "--warm=2", f"--steps={steps}"]
        ranks = run_ranks("benchmarks.worker", options, num_ranks=int(num_ranks), timeout_seconds=300)
        runs[num_ranks].append(Run(size, "fp32", ENGINE, number, tuple(ranks)))
    return [
        {
            "ranks": int(num_ranks),
            "seconds": median(run.seconds for run in done),
            "cpu_seconds": median(run.cpu_seconds for run in done),
            "peak_bytes": median(run.peak_bytes for run in done),
            "sent_bytes": median(run.sent_bytes or 0 for run in done),
        }
        for num_ranks, done in runs.items()
    ]


def _medians(calls: dict[str, Callable[[], float]], num_rounds: int) -> dict[str, float]:
    """Seconds of each, taken in turns. The first turn only warms the file cache."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number, name in interleaved(list(calls), num_rounds + 1):
        seconds = calls[name]()
        if number > 0:
            found[name].append(seconds)
    return {name: median(each) for name, each in found.items()}


def _import(code: str) -> Callable[[], float]:
    return lambda: _timed([sys.executable, "-c", code])


def _start(launch: list[str]) -> Callable[[], float]:
    """From nothing until both ranks have met and left."""
    return lambda: _timed([*launch, "benchmarks.start_rank"])


def _timed(command: list[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment(on_cpu=True), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise RunError(f"{' '.join(command[:4])} failed: {lines[-1]}")
    return seconds


def _show(result: dict[str, Any], console: Console) -> None:
    rows = [
        [
            str(row["ranks"]),
            f"{row['seconds'] * 1000:.0f}",
            f"{row['cpu_seconds'] * 1000:.0f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['sent_bytes'] / 2**20:.1f}",
        ]
        for row in result["ranks"]
    ]
    title = f"{result['engine']}, {result['size']}, fp32, per rank and step"
    show_figures(title, ["ranks", "ms", "CPU ms", "peak MiB", "sent MiB"], rows, console)
    begin = {f"import {name}": each for name, each in result["import_seconds"].items()}
    begin |= {f"2 ranks met, by {name}": each for name, each in result["start_seconds"].items()}
    show_figures("to begin", ["what", "s"], [[name, f"{each:.2f}"] for name, each in begin.items()], console)
