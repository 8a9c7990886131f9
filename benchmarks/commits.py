"""Whether this checkout is slower than an older commit: both in turns, by the processor's time and by calls."""

from __future__ import annotations

import argparse
import compileall
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.fresh import ROOT, RunError, environment, run_ranks
from benchmarks.machine import header
from benchmarks.overhead import run_host
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.show import show_figures

HERE = "here"
HOST_ENGINES = ("shardwise-ddp", "shardwise-zero3")
NUM_BLOCKS = 8
# `import shardwise` by itself imports next to nothing: names come when they are first used.
IMPORT = """import time, torch
start = time.process_time()
from shardwise import shard
print(time.process_time() - start)"""


class Ratio(NamedTuple):
    """One figure: medians over rounds of both, and of here over there in the same round, with the extremes."""

    figure: str
    there: float
    here: float
    over: float
    least: float
    most: float


def main(args: argparse.Namespace, console: Console) -> int:
    if args.against is None:
        raise RunError("With which commit? Say --against COMMIT.")
    num_rounds, steps = (1, 3) if args.quick else (args.rounds or 5, 20)
    result: dict[str, Any] = header(args.note) | {"benchmark": "commits", "against": args.against, "runs": []}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        sources = {HERE: ROOT / "src", args.against: source_at(args.against, Path(folder))}
        for source in sources.values():
            compileall.compile_dir(source, quiet=2)
        for part in _parts(steps):
            for number, name in interleaved(list(sources), num_rounds):
                for figure, value in part(sources[name]).items():
                    result["runs"].append({"figure": figure, "commit": name, "round": number, "value": value})
    result["summary"] = [ratio._asdict() for ratio in ratios_of(result["runs"])]
    file = write_result(args.out / "commits.json", result)
    rows = [_line(ratio) for ratio in ratios_of(result["runs"])]
    title = f"this checkout beside {args.against}, medians of {num_rounds} rounds in turns"
    show_figures(title, ["figure", args.against, HERE, "ratio", "least-most"], rows, console)
    console.print(f"\n{file}", markup=False)
    return 0


def source_at(commit: str, folder: Path) -> Path:
    """The package as it was, in `folder`: the checkout and its list of worktrees stay as they are."""
    command = ["git", "-C", str(ROOT), "archive", commit, "src"]
    packed = subprocess.run(command, capture_output=True, check=False)
    if packed.returncode != 0:
        raise RunError(f"{commit} is no commit of this repository: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed.stdout, check=True)
    return folder / "src"


def ratios_of(runs: list[dict[str, Any]]) -> list[Ratio]:
    """Pure. Of each figure, in the order in which they were taken."""
    ratios = []
    for figure in dict.fromkeys(run["figure"] for run in runs):
        values = {(run["commit"] == HERE, run["round"]): run["value"] for run in runs if run["figure"] == figure}
        here, there = ([value for (is_here, _), value in values.items() if is_here is side] for side in (True, False))
        over = [value / values[False, number] for (is_here, number), value in values.items() if is_here]
        ratios.append(Ratio(figure, median(there), median(here), median(over), min(over), max(over)))
    return ratios


def _parts(steps: int) -> list[Callable[[Path], dict[str, float]]]:
    hosts = [lambda source, engine=engine: _host(engine, steps, source) for engine in HOST_ENGINES]
    return [_import, *hosts, lambda source: _step(steps, source)]


def _import(source: Path) -> dict[str, float]:
    command = [sys.executable, "-c", IMPORT]
    env = environment(on_cpu=True, source=source)
    done = subprocess.run(command, env=env, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RunError(f"from shardwise import shard failed: {done.stderr.strip()}")
    return {"import, CPU ms": float(done.stdout) * 1000}


def _host(engine: str, steps: int, source: Path) -> dict[str, float]:
    """Of a step of small blocks whose messages take no time: see `overhead`."""
    run = run_host(engine, "fp32", steps, NUM_BLOCKS, source)
    seconds = run["passes_seconds"] + run["update_seconds"]
    return {f"{engine} host, CPU ms": seconds * 1000, f"{engine} host, Python calls": run["calls"]}


def _step(steps: int, source: Path) -> dict[str, float]:
    """Of a small GPT on two ranks."""
    options = ["--engine=shardwise-zero3", "--size=tiny", "--dtype=fp32", "--warm=3", f"--steps={steps}"]
    ranks = run_ranks("benchmarks.worker", options, num_ranks=2, timeout_seconds=300, source=source)
    return {
        "zero3 step, CPU ms": max(rank["cpu_seconds"] for rank in ranks) * 1000,
        "zero3 step, ms": max(median(rank["step_seconds"]) for rank in ranks) * 1000,
    }


def _line(ratio: Ratio) -> list[str]:
    form = "{:.0f}" if ratio.figure.endswith("calls") else "{:.2f}"
    pair = [form.format(value) for value in (ratio.there, ratio.here)]
    return [ratio.figure, *pair, f"{ratio.over:.3f}", f"{ratio.least:.3f}-{ratio.most:.3f}"]
