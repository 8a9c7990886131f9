"""Codes between hosts: steps with int8 parameters and int4 gradients over those with both in bf16, and the bytes.

Hosts and links are those of `hosts.py`. The model is larger, so that embeddings and norms, which are sent whole, count
less, and computes as fast as it can: where computing hides messages, smaller ones save nothing. Losses are shown and
not compared: they are of different roundings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from benchmarks.hosts import Races, Shape
from benchmarks.hosts_names import BESIDE_BYTES, HEADERS, Row
from benchmarks.show import show_figures

BARS = {0.1e9: 0.40, 1e9: 0.75}
"""At each rate, the step with codes over that in bf16 that is to be reached."""
PLAIN, CODES = "bf16", "codes"


def main(args: argparse.Namespace, console: Console) -> int:
    """0; 1 if a bar is missed, or more bytes crossed a link than ranks say. Raises `RunError`."""
    return Races(
        "wires",
        shapes=((2, 1), (2, 2)),
        quick_shape=(2, 1),
        engines_for=_engines_for,
        compared=lambda _: {},
        show=_show,
        faults_of=lambda rows, is_quick: faults_of(rows, with_bars=not is_quick),
        size="wires",
        block_seconds=0.0,
    ).run(args, console)


def _engines_for(num_local: int) -> list[str]:
    presets = ("zero2", "zero3") if num_local == 1 else ("zero2", "zero3", "hpz")
    return [f"shardwise-{preset}:{wire}" for preset in presets for wire in (PLAIN, CODES)]


def _show(shape: Shape, _: float, rows: Sequence[Row], console: Console) -> None:
    show_figures(f"{shape[0]} hosts x {shape[1]}", _COLUMNS, lines_of(rows), console)


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
