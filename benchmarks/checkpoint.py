"""What a checkpoint costs: the stall of a background save, bytes per second beside `dd`, and the peers' beside ours."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.system.neighbours import Neighbours
from shardwise.system.units import format_bytes

NUM_RANKS = 2
LOADS_OVER_A_STATE = {"load over a state": "dcp load", "load over a state, warm": "dcp load, warm"}
"""Ours, and DCP's, which always loads into what is there."""


def main(args: argparse.Namespace, console: Console) -> int:
    """The first turn warms up, and only its stall is kept: it is the one that takes memory for the copy."""
    mib, turns = (16, 3) if args.quick else (256, 8)
    result: dict[str, Any] = header(args.note) | {"benchmark": "checkpoint", "ranks": NUM_RANKS, "turns": turns - 1}
    options = [f"--mib={mib}", f"--turns={turns}", f"--folder={args.folder}"]
    neighbours = Neighbours()
    figures = run_ranks("benchmarks.checkpoint_rank", options, num_ranks=NUM_RANKS, timeout_seconds=500)[0]
    result["others_cores"] = neighbours.cores()
    result |= {"bytes": figures["bytes"], "all_seconds": figures["seconds"], "all_cpu_seconds": figures["cpu_seconds"]}
    medians = {name: statistics.median(values[1:]) for name, values in figures["seconds"].items()}
    result["seconds"] = medians | {"first stall": figures["seconds"]["stall"][0]}
    result["ratios"] = ratios_of(medians) | ratios_in_turns(figures["seconds"], "time")
    result["ratios"] |= ratios_in_turns(figures["cpu_seconds"], "CPU time")
    file = write_result(args.out / "checkpoint.json", result)
    _show(result, console)
    console.print(f"\n{file}", markup=False)
    return 0


def ratios_of(seconds: dict[str, float]) -> dict[str, float]:
    """Of medians: what the goals are about, then a peer's time over ours for the same thing."""
    ratios = {"stall / sync": seconds["stall"] / seconds["sync"], "rate of sync / dd": seconds["dd"] / seconds["sync"]}
    for name, value in seconds.items():
        peer, _, what = name.rpartition(" ")
        if what in ("sync", "stall", "load") and peer:
            flush = seconds.get(f"{peer} flush", 0.0) if what == "sync" else 0.0
            ratios[f"{name} / ours"] = (value + flush) / seconds[what]
    return ratios


def ratios_in_turns(seconds: dict[str, list[float]], of: str) -> dict[str, float]:
    """Of loads over a state: DCP's over ours in the same turn, their median."""
    ratios = {}
    for mine, theirs in LOADS_OVER_A_STATE.items():
        if theirs in seconds:
            pairs = zip(seconds[theirs][1:], seconds[mine][1:], strict=True)
            ratios[f"{theirs} / our {mine}, {of}"] = statistics.median(peer / own for peer, own in pairs)
    return ratios


def _show(result: dict[str, Any], console: Console) -> None:
    times = [[name, f"{value * 1000:.1f}"] for name, value in result["seconds"].items()]
    size = format_bytes(result["bytes"]["shardwise"])
    others = f"; others used {result['others_cores']:.1f} cores" if result["others_cores"] else ""
    show_figures(f"checkpoint, {result['ranks']} ranks, {size}: medians{others}", ["what", "ms"], times, console)
    show_figures("bytes", ["whose", "bytes"], [[name, str(value)] for name, value in result["bytes"].items()], console)
    ratios = [[name, f"{value:.3f}"] for name, value in result["ratios"].items()]
    show_figures("ratios", ["what", "ratio"], ratios, console)
