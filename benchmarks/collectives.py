"""Our pairwise all-gather and reduce-scatter beside those of torch.distributed over gloo, from 4 KiB to 64 MiB."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.system.units import format_bytes

TIMED_RANKS = 2
CHECKED_RANKS = (2, 3, 4)
"""Times are taken on as many ranks as a small machine has cores; sums are compared on more."""


def main(args: argparse.Namespace, console: Console) -> int:
    repeats = 5 if args.quick else 15
    largest = 2**20 if args.quick else 64 * 2**20
    result: dict[str, Any] = header(args.note) | {"benchmark": "collectives", "repeats": repeats}
    result["timed"] = _timed(repeats, largest)
    result["checked_ranks"] = [num_ranks for num_ranks in CHECKED_RANKS if _checked(num_ranks)]
    file = write_result(args.out / "collectives.json", result)
    _show(result["timed"], console)
    console.print(f"\nSums and chunks were right on {', '.join(map(str, CHECKED_RANKS))} ranks.\n{file}", markup=False)
    return 0


def _timed(repeats: int, largest_bytes: int) -> list[dict[str, Any]]:
    options = [f"--repeats={repeats}", f"--largest={largest_bytes}"]
    ranks = run_ranks("benchmarks.collectives_rank", options, num_ranks=TIMED_RANKS, timeout_seconds=500)
    timed: list[dict[str, Any]] = ranks[0]["timed"]
    return timed


def _checked(num_ranks: int) -> bool:
    """Every rank compares to the bit and raises if something is off, which arrives here as a `RunError`."""
    options = ["--repeats=1", f"--largest={2**16}"]
    ranks = run_ranks("benchmarks.collectives_rank", options, num_ranks=num_ranks, timeout_seconds=120)
    return all(rank["timed"] for rank in ranks)


def _show(timed: list[dict[str, Any]], console: Console) -> None:
    for dtype in dict.fromkeys(row["dtype"] for row in timed):
        rows = [_line(row) for row in timed if row["dtype"] == dtype]
        columns = ["whole buffer", "verb", "ours ms", "gloo ms", "gloo / ours"]
        show_figures(f"collectives, {dtype}, {TIMED_RANKS} ranks: median", columns, rows, console)


def _line(row: dict[str, Any]) -> list[str]:
    ours, gloo = row["ours_seconds"] * 1000, row["gloo_seconds"] * 1000
    return [format_bytes(row["bytes"]), row["verb"], f"{ours:.2f}", f"{gloo:.2f}", f"{row['gloo_over_ours']:.2f}"]
