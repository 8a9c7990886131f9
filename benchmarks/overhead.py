"""What an engine costs the host: CPU time of its step less a plain model's, where messages take no time at all."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.fresh import SOURCE, run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.show import show_figures

PLAIN = "plain"
ENGINES = (PLAIN, "bare", "fsdp2", "shardwise-zero3")
DTYPES = ("fp32", "bf16")
NUM_BLOCKS = 24
WORLD_SIZE = 8


def main(args: argparse.Namespace, console: Console) -> int:
    num_rounds, steps = (2, 5) if args.quick else (5, 20)
    result: dict[str, Any] = header(args.note) | {
        "benchmark": "overhead",
        "blocks": NUM_BLOCKS,
        "world_size": WORLD_SIZE,
    }
    result["runs"] = [
        {"dtype": dtype, "engine": engine, "round": number, **run_host(engine, dtype, steps)}
        for dtype in DTYPES
        for number, engine in interleaved(ENGINES, num_rounds)
    ]
    result["summary"] = [row for dtype in DTYPES for row in summary_of(result["runs"], dtype)]
    file = write_result(args.out / "overhead.json", result)
    columns = ["engine", "forward, backward us/block", "optimizer us/block", "whole step ms"]
    for dtype in DTYPES:
        rows = [_line(row) for row in result["summary"] if row["dtype"] == dtype]
        title = (
            f"host time over the plain model, {dtype}, {NUM_BLOCKS} blocks of 16 parameters, {WORLD_SIZE} fake ranks"
        )
        show_figures(title, columns, rows, console)
    console.print(f"\n{file}", markup=False)
    return 0


def summary_of(runs: list[dict[str, Any]], dtype: str) -> list[dict[str, Any]]:
    """By engine: the median over rounds of its times less those of the plain model in the same round."""
    by_round = {(run["engine"], run["round"]): run for run in runs if run["dtype"] == dtype}
    rows = []
    for engine in dict.fromkeys(engine for engine, _ in by_round):
        own = {number: run for (name, number), run in by_round.items() if name == engine}
        over = {
            part: median(run[part] - by_round[PLAIN, number][part] for number, run in own.items())
            for part in ("passes_seconds", "update_seconds")
        }
        whole = median(run["passes_seconds"] + run["update_seconds"] for run in own.values())
        rows.append({"dtype": dtype, "engine": engine, "whole_seconds": whole, "over_plain": over})
    return rows


def run_host(
    engine: str, dtype: str, steps: int, num_blocks: int = NUM_BLOCKS, source: Path = SOURCE
) -> dict[str, Any]:
    """CPU seconds of a step, by part, and its calls of Python functions, in a fresh process."""
    options = [f"--engine={engine}", f"--dtype={dtype}", f"--blocks={num_blocks}", f"--steps={steps}"]
    return run_ranks("benchmarks.overhead_rank", options, num_ranks=1, timeout_seconds=120, source=source)[0]


def _line(row: dict[str, Any]) -> list[str]:
    over = row["over_plain"]
    each = [f"{over[part] / NUM_BLOCKS * 1e6:.0f}" for part in ("passes_seconds", "update_seconds")]
    return [row["engine"], *each, f"{row['whole_seconds'] * 1000:.1f}"]
