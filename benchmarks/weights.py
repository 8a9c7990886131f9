"""What it takes to bring new weights to a sampler: the stream of weights, beside a gathered `state_dict`."""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.fresh import run_ranks
from benchmarks.machine import header
from benchmarks.results_file import write_result
from benchmarks.show import show_figures
from shardwise.system.neighbours import Neighbours
from shardwise.system.units import format_bytes

NUM_RANKS = 2
STREAM, STREAM_ON_ALL = "weights to rank 0", "weights to all ranks"
GATHERED, PUBLISHED, BESIDE = "gathered into files", "published as files", "published beside steps"
STATE, STATE_ON_ALL, FSDP2 = "state_dict on rank 0", "state_dict on all ranks", "fsdp2 state_dict on rank 0"
DEEPSPEED = "deepspeed-3, parameter by parameter"
WAYS = {STREAM: STATE, STATE: STATE, FSDP2: STATE, DEEPSPEED: STATE}
WAYS |= {STREAM_ON_ALL: STATE_ON_ALL, STATE_ON_ALL: STATE_ON_ALL}
WAYS |= {GATHERED: STATE, PUBLISHED: STATE, BESIDE: STATE}
"""Each with the one that it is compared with. Of what is done beside steps, the call alone is timed."""


def main(args: argparse.Namespace, console: Console) -> int:
    """The first turn of each warms up. The exit status is 1 if a way brings other values than the first."""
    turns = 2 if args.quick else 6
    result: dict[str, Any] = header(args.note) | {"benchmark": "weights", "ranks": NUM_RANKS, "turns": turns - 1}
    options = [f"--size={'tiny' if args.quick else '135m'}", f"--turns={turns}", f"--folder={args.folder}"]
    neighbours = Neighbours()
    ranks = run_ranks("benchmarks.weights_rank", options, num_ranks=NUM_RANKS, timeout_seconds=340)
    result |= {"others_cores": neighbours.cores(), "all": ranks, "params": ranks[0]["params"]}
    result["summary"] = summary_of(ranks)
    file = write_result(args.out / "weights.json", result)
    columns = ["way", "ms", "over state_dict", "CPU ms", "sent MiB", "peak MiB"]
    size = format_bytes(ranks[0]["num_bytes"])
    title = f"{result['params'] / 1e6:.0f} M parameters under zero3 to copies in bf16 ({size}), {NUM_RANKS} ranks"
    show_figures(title, columns, [_line(row) for row in result["summary"]], console)
    console.print(f"\n{file}", markup=False)
    if DEEPSPEED not in ranks[0]["ways"]:
        console.print("Without DeepSpeed, which is not installed.", markup=False)
    return 0 if all(row["agrees"] for row in result["summary"]) else 1


def summary_of(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By way: medians over turns of the slowest rank, and of ratios in the same turn; most bytes of any rank."""

    def turns_of(way: str, what: str) -> list[float]:
        return [max(values) for values in zip(*(rank["ways"][way][what] for rank in ranks), strict=True)][1:]

    rows = []
    for way, other in WAYS.items():
        if any(way not in rank["ways"] for rank in ranks):
            continue
        pairs = zip(turns_of(way, "seconds"), turns_of(other, "seconds"), strict=True)
        every = [rank["ways"][way] for rank in ranks]
        rows.append(
            {
                "way": way,
                "seconds": median(turns_of(way, "seconds")),
                "over_state_dict": median(own / theirs for own, theirs in pairs),
                "cpu_seconds": median(turns_of(way, "cpu_seconds")),
                "sent_bytes": max(one["sent_bytes"] for one in every),
                "peak_bytes": max(one["peak_bytes"] for one in every),
                "agrees": all(one["agrees"] for one in every),
            }
        )
    return rows


def _line(row: dict[str, Any]) -> list[str]:
    return [
        row["way"] if row["agrees"] else f"{row['way']} (other values)",
        f"{row['seconds'] * 1000:.0f}",
        f"{row['over_state_dict']:.2f}",
        f"{row['cpu_seconds'] * 1000:.0f}",
        f"{row['sent_bytes'] / 2**20:.1f}",
        f"{row['peak_bytes'] / 2**20:.0f}",
    ]
