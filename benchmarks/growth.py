"""What more ranks, more parameters and more units cost each rank; and what it costs to begin."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.fresh import ROOT, RunError, environment, launcher, run_ranks
from benchmarks.machine import header
from benchmarks.names import APART
from benchmarks.overhead import PLAIN, run_host
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.show import show_figures
from benchmarks.sizes import SIZES
from benchmarks.summary import Run

ENGINE = "shardwise-zero3"
RACES = (("small", 1), ("small", 2), ("small", 4), ("small", 8), ("large", 2))
QUICK_RACES = (("tiny", 1), ("tiny", 2))
BLOCKS = (24, 48, 96)
# `import shardwise` by itself imports next to nothing: names come when they are first used.
IMPORTS = {"torch": "import torch", "torch and shardwise": "import torch; from shardwise import shard"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def main(args: argparse.Namespace, console: Console) -> int:
    races, num_rounds = (QUICK_RACES, args.rounds or 2) if args.quick else (RACES, args.rounds or 3)
    result: dict[str, Any] = header(args.note) | {"benchmark": "growth", "engine": ENGINE}
    result["ranks"] = _by_ranks(races, num_rounds)
    result["units"] = _by_units(num_rounds, 5 if args.quick else 15)
    result["import_seconds"] = _medians({name: _import(code) for name, code in IMPORTS.items()}, 3 if args.quick else 7)
    result["start_seconds"] = _medians(
        {"shardwise launch": _start([*launcher(2), "-m"]), "torchrun": _start([*TORCHRUN, "-m"])}, num_rounds
    )
    file = write_result(args.out / "growth.json", result)
    _show(result, console)
    console.print(f"\n{file}", markup=False)
    return 0


def _by_ranks(races: Sequence[tuple[str, int]], num_rounds: int) -> list[dict[str, Any]]:
    """The medians over rounds of what one rank takes, with the same micro-batch each, beside as many plain processes.

    Those share cores and memory's bandwidth as ranks do, so that the difference is what is due to us.
    """
    turns = {f"{engine} {size} {ranks}": (engine, size, ranks) for size, ranks in races for engine in (APART, ENGINE)}
    runs: dict[str, list[Run]] = {name: [] for name in turns}
    for number, name in interleaved(list(turns), num_rounds):
        engine, size, ranks = turns[name]
        options = [f"--engine={engine}", f"--size={size}", "--dtype=fp32", "--warm=2", "--steps=4"]
        figures = run_ranks("benchmarks.worker", options, num_ranks=ranks, timeout_seconds=300)
        runs[name].append(Run(size, "fp32", engine, number, tuple(figures)))
    return [
        {
            "engine": engine,
            "size": size,
            "params": SIZES[size].params,
            "ranks": ranks,
            "seconds": median(run.seconds for run in runs[name]),
            "cpu_seconds": median(run.cpu_seconds for run in runs[name]),
            "peak_bytes": median(run.peak_bytes for run in runs[name]),
        }
        for name, (engine, size, ranks) in turns.items()
    ]


def _by_units(num_rounds: int, steps: int) -> list[dict[str, Any]]:
    """Host time of a block's forward and backward over the plain model's, by the number of blocks: see `overhead`."""
    over: dict[int, list[float]] = {num_blocks: [] for num_blocks in BLOCKS}
    for _, name in interleaved([str(num_blocks) for num_blocks in BLOCKS], num_rounds):
        num_blocks = int(name)
        plain, ours = (run_host(engine, "fp32", steps, num_blocks)["passes_seconds"] for engine in (PLAIN, ENGINE))
        over[num_blocks].append((ours - plain) / num_blocks)
    return [{"blocks": num_blocks, "block_seconds": median(each)} for num_blocks, each in over.items()]


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
            f"{row['params'] / 1e6:.1f} M",
            str(row["ranks"]),
            row["engine"],
            f"{row['seconds'] * 1000:.0f}",
            f"{row['cpu_seconds'] * 1000:.0f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
        ]
        for row in result["ranks"]
    ]
    columns = ["parameters", "ranks", "engine", "ms", "CPU ms", "peak MiB"]
    show_figures("per rank and step, fp32", columns, rows, console)
    units = [[str(row["blocks"]), f"{row['block_seconds'] * 1e6:.0f}"] for row in result["units"]]
    show_figures("host time over the plain model, fp32", ["blocks", "us/block"], units, console)
    begin = {f"import {name}": each for name, each in result["import_seconds"].items()}
    begin |= {f"2 ranks met, by {name}": each for name, each in result["start_seconds"].items()}
    show_figures("to begin", ["what", "s"], [[name, f"{each:.2f}"] for name, each in begin.items()], console)
