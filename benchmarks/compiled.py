"""What `compile: inductor` in a plan is worth, beside what torch.compile is worth to the plain model."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.schedule import interleaved
from benchmarks.show import show_figures
from benchmarks.sizes import SIZES

BACKEND = "inductor"
PLAIN, PLAIN_COMPILED = "plain", "plain, compiled"
ZERO3, ZERO3_COMPILED = "shardwise-zero3", "shardwise-zero3, compiled"
PAIRS = {PLAIN_COMPILED: PLAIN, ZERO3_COMPILED: ZERO3}
ENGINES = (PLAIN, PLAIN_COMPILED, ZERO3, ZERO3_COMPILED)
# What fused operations round otherwise, after a few steps on the same tokens.
SAME_LOSS = 1e-4


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a compiled engine trains otherwise than the same engine uncompiled, or breaks a graph."""
    size, num_rounds, steps = ("tiny", 2, 5) if args.quick else ("small", 3, 4)
    result: dict[str, Any] = header(args.note) | {"benchmark": "compile", "size": size, "backend": BACKEND}
    result["runs"] = runs = []
    for number, engine in interleaved(ENGINES, num_rounds):
        runs.append({"engine": engine, "round": number, **_run(engine, size, steps)})
        result["summary"] = summary_of(runs)
        file = write_result(args.out / "compile.json", result)
    columns = ["engine", "ms/step", "fastest-slowest", "x uncompiled", "CPU ms", "graphs", "breaks", "loss"]
    title = f"torch.compile with {BACKEND}: {size}, fp32, {SIZES[size].num_ranks} ranks of one thread"
    show_figures(title, columns, [_line(row) for row in result["summary"]], console)
    console.print(f"\n{file}", markup=False)
    wrong = faults_of(result["summary"])
    for sentence in wrong:
        console.print(sentence, markup=False)
    return 1 if wrong else 0


def summary_of(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By engine: medians over rounds, and the step time over that of the uncompiled engine in the same round."""
    by_round = {(run["engine"], run["round"]): run for run in runs}
    rows = []
    for engine in dict.fromkeys(run["engine"] for run in runs):
        own = [run for run in runs if run["engine"] == engine]
        partners = [(run, by_round.get((PAIRS.get(engine, engine), run["round"]))) for run in own]
        ratios = [run["seconds"] / partner["seconds"] for run, partner in partners if partner is not None]
        seconds = [run["seconds"] for run in own]
        rows.append(
            {
                "engine": engine,
                "seconds": median(seconds),
                "fastest_seconds": min(seconds),
                "slowest_seconds": max(seconds),
                "over_uncompiled": median(ratios) if ratios else None,
                "cpu_seconds": median(run["cpu_seconds"] for run in own),
                "num_graphs": max(run["num_graphs"] for run in own),
                "num_graph_breaks": max(run["num_graph_breaks"] for run in own),
                "loss": own[0]["loss"],
            }
        )
    return rows


def faults_of(summary: list[dict[str, Any]]) -> list[str]:
    """A sentence for each compiled engine whose losses are others, or whose graphs are broken."""
    rows = {row["engine"]: row for row in summary}
    wrong = []
    for engine, uncompiled in PAIRS.items():
        loss, expected = rows[engine]["loss"], rows[uncompiled]["loss"]
        if abs(loss - expected) > SAME_LOSS * abs(expected):
            wrong.append(f"{engine}: the loss is {loss:.6f}, uncompiled it is {expected:.6f}.")
        if rows[engine]["num_graph_breaks"]:
            wrong.append(f"{engine}: {rows[engine]['num_graph_breaks']} graph breaks.")
    return wrong


def _run(engine: str, size: str, steps: int) -> dict[str, Any]:
    """One job: what its slower rank took, the mean loss of its ranks after the last step, and its graphs."""
    options = [f"--engine={engine}", f"--size={size}", f"--steps={steps}"]
    ranks = run_ranks("benchmarks.compiled_rank", options, num_ranks=SIZES[size].num_ranks, timeout_seconds=600)
    return {
        "seconds": max(median(rank["step_seconds"]) for rank in ranks),
        "cpu_seconds": max(rank["cpu_seconds"] for rank in ranks),
        "warm_seconds": max(rank["warm_seconds"] for rank in ranks),
        "loss": sum(rank["loss"] for rank in ranks) / len(ranks),
        "num_graphs": max(rank["num_graphs"] for rank in ranks),
        "num_graph_breaks": max(rank["num_graph_breaks"] for rank in ranks),
    }


def _line(row: dict[str, Any]) -> list[str]:
    ratio = row["over_uncompiled"]
    return [
        row["engine"],
        f"{row['seconds'] * 1000:.0f}",
        f"{row['fastest_seconds'] * 1000:.0f}-{row['slowest_seconds'] * 1000:.0f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{row['cpu_seconds'] * 1000:.0f}",
        str(row["num_graphs"]),
        str(row["num_graph_breaks"]),
        f"{row['loss']:.6f}",
    ]
