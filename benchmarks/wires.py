"""Codes between hosts: steps with int8 parameters and int4 gradients over those with both in bf16, and the bytes.

Hosts, links and the model are those of `hosts.py`. Losses are shown and not compared: they are of different roundings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from benchmarks.fresh import RunError
from benchmarks.hosts import BLOCK_SECONDS, RATES, run_on_hosts
from benchmarks.hosts_names import BESIDE_BYTES, FREE, HEADERS, Row, Turn, rows_of
from benchmarks.machine import header, load_average
from benchmarks.namespaces import obstacle
from benchmarks.results_file import write_result
from benchmarks.show import show_figures

SHAPES: tuple[tuple[int, int], ...] = ((2, 1), (2, 2))
"""Hosts, and ranks on each."""
BARS = {0.1e9: 0.40, 1e9: 0.75}
"""At each rate, the step with codes over that in bf16 that is to be reached."""
PLAIN, CODES = "bf16", "codes"


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a bar is missed, or more bytes crossed a link than ranks say. Raises `RunError`."""
    why = obstacle()
    if why:
        raise RunError(f"hosts as network namespaces: {why}")
    size, rates, shapes, num_steps, seconds = "hosts", RATES, SHAPES, 3, BLOCK_SECONDS
    if args.quick:
        size, rates, shapes, num_steps, seconds = "tiny", (FREE, 0.1e9), ((2, 1),), 2, 0.01
    rates = (FREE, *(gbit * 1e9 for gbit in args.gbit)) if args.gbit else rates
    result: dict[str, Any] = header(args.note) | {"benchmark": "wires", "size": size, "block_seconds": seconds}
    result["races"] = []
    wrong = []
    for num_hosts, num_local in args.hosts or shapes:
        presets = ("zero2", "zero3") if num_local == 1 else ("zero2", "zero3", "hpz")
        engines = [f"shardwise-{preset}:{wire}" for preset in presets for wire in (PLAIN, CODES)]
        options = [f"--engines={','.join(engines)}", f"--size={size}", f"--rates={','.join(map(str, rates))}"]
        options += [f"--rounds={args.rounds or (1 if args.quick else 2)}", f"--steps={num_steps}"]
        options += [f"--block-seconds={seconds}"]
        before = load_average()
        ranks = run_on_hosts("benchmarks.hosts_rank", options, num_hosts, num_local, args.delay_ms / 1e3)
        rows = rows_of([[Turn(*turn) for turn in rank["turns"]] for rank in ranks], num_local, ranks[0]["promised"])
        race: dict[str, Any] = {"hosts": num_hosts, "ranks_per_host": num_local, "load_average_before": before}
        result["races"].append(race | {"rows": [row._asdict() for row in rows]})
        file = write_result(args.out / "wires.json", result)
        show_figures(f"{num_hosts} hosts x {num_local}", _COLUMNS, lines_of(rows), console)
        wrong += [f"{num_hosts} x {num_local}: {sentence}" for sentence in faults_of(rows, with_bars=not args.quick)]
    console.print(f"\n{file}", markup=False)
    for sentence in wrong:
        console.print(sentence, markup=False)
    return 1 if wrong else 0


_COLUMNS = ["engine", "Gbit/s", "ms/step", "over bf16", "CPU ms", "MB over a link", "promised", "over bf16", "loss"]


def _beside(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each row with codes, and that in bf16."""
    by_name = {(row.engine, row.rate): row for row in rows}
    coded = [row for row in rows if row.engine.endswith(f":{CODES}")]
    return [(row, by_name[row.engine.removesuffix(CODES) + PLAIN, row.rate]) for row in coded]


def lines_of(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of a table: each row in bf16, then that with codes, and what this takes of it."""
    lines = []
    for row, plain in _beside(rows):
        for each in (plain, row):
            is_coded = each is row
            promised = f"{each.promised_bytes / 1e6:.2f}" if each.promised_bytes is not None else ""
            lines.append(
                [
                    each.engine,
                    f"{each.rate / 1e9:g}" if each.rate else "free",
                    f"{each.step_seconds * 1e3:.0f}",
                    f"{row.step_seconds / plain.step_seconds:.2f}" if is_coded else "",
                    f"{each.cpu_seconds * 1e3:.0f}",
                    f"{each.link_bytes / 1e6:.2f}",
                    promised,
                    f"{row.link_bytes / plain.link_bytes:.2f}" if is_coded else "",
                    f"{each.loss:.6f}",
                ]
            )
    return lines


def faults_of(rows: Sequence[Row], *, with_bars: bool) -> list[str]:
    """A sentence for each bar that is missed, and for each engine that sent what it did not say."""
    wrong = [
        f"{row.engine}: {row.link_bytes:.0f} bytes crossed a link, ranks say {row.told_bytes:.0f}."
        for row in rows
        if row.told_bytes is not None and row.link_bytes > HEADERS * row.told_bytes + BESIDE_BYTES
    ]
    for row, plain in _beside(rows) if with_bars else ():
        share = row.step_seconds / plain.step_seconds
        if share > BARS.get(row.rate, float("inf")):
            wrong.append(f"{row.engine} at {row.rate / 1e9:g} Gbit/s: {share:.2f} of a step in bf16.")
    return wrong
