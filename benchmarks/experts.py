"""Our layer of experts over two ranks beside plain torch's and DeepSpeed's: a forward and backward."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from benchmarks.experts_rank import EXPERTS, HIDDEN, INNER, TOP_K
from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures

NUM_RANKS = 2
NUM_TOKENS = 2048


def main(args: argparse.Namespace, console: Console) -> int:
    repeats = 3 if args.quick else 15
    options = [f"--repeats={repeats}", f"--tokens={NUM_TOKENS}"]
    ranks = run_ranks("benchmarks.experts_rank", options, num_ranks=NUM_RANKS, timeout_seconds=500)
    result: dict[str, Any] = header(args.note) | {"benchmark": "experts", "repeats": repeats, **ranks[0]}
    file = write_result(args.out / "experts.json", result)
    title = (
        f"{NUM_TOKENS} tokens a rank, {EXPERTS} experts of {HIDDEN} -> {INNER}, top {TOP_K}, {NUM_RANKS} ranks, fp32"
    )
    rows = [[row["layer"], f"{row['seconds'] * 1000:.1f}", f"{row['over_ours']:.2f}"] for row in result["timed"]]
    show_figures(title, ["layer", "ms", "over ours"], rows, console)
    console.print(f"\n{file}", markup=False)
    return 0
