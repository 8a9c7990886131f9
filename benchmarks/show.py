"""Results as tables on the screen."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.names import is_ours
from benchmarks.summary import Ratio, Row, Run, failures_of, ratios_of, rows_of
from shardwise.system.neighbours import BUSY_CORES
from shardwise.system.units import format_count


def show_race(runs: list[Run], race: dict[str, Any], console: Console) -> None:
    """One size in one dtype: its engines, then ours against each counterpart."""
    size, dtype = race["size"], race["dtype"]
    console.print()
    console.print(_engines(race, rows_of(runs, size, dtype)))
    ratios = ratios_of(runs, size, dtype)
    if ratios:
        console.print()
        console.print(_ratios(ratios))
    for run in failures_of(runs, size, dtype):
        console.print(f"{run.engine} failed in round {run.round + 1}: {run.error}", markup=False)


def show_loss_verdict(runs: list[Run], races: list[dict[str, Any]], console: Console) -> bool:
    """Say whether all engines trained the same; True if they did."""
    rows = [(race, row) for race in races for row in rows_of(runs, race["size"], race["dtype"])]
    strangers = [f"{row.engine} ({race['size']} {race['dtype']})" for race, row in rows if row.agrees is False]
    compared = sum(row.agrees is not None for _, row in rows)
    console.print()
    if strangers:
        console.print(f"These did not train the same as one process on all the data: {', '.join(strangers)}.")
    elif compared:
        console.print(f"All {compared} losses agree with one process on all the data, within rounding.")
    return not strangers


def show_figures(title: str, columns: list[str], rows: list[list[str]], console: Console) -> None:
    table = _table(title, *columns)
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _engines(race: dict[str, Any], rows: list[Row]) -> Table:
    ranks, params = race["ranks"], format_count(race["params"])
    title = f"{race['size']}, {race['dtype']}: {params} parameters, {ranks} ranks"
    if race["others_cores"] > BUSY_CORES:
        title += f" (others used {race['others_cores']} cores meanwhile: trust bytes, not times)"
    table = _table(
        title,
        "engine",
        "ms/step",
        "fastest-slowest",
        "x single",
        "CPU ms",
        "peak MiB",
        "/ promised",
        "sent MiB",
        "loss",
    )
    for row in rows:
        table.add_row(
            Text(row.engine, style="bold" if is_ours(row.engine) else ""),
            _ms(row.seconds),
            f"{_ms(row.fastest_seconds)}-{_ms(row.slowest_seconds)}",
            _times(row.over_single),
            _ms(row.cpu_seconds),
            f"{row.peak_bytes / 2**20:.0f}",
            _times(row.over_promised),
            "-" if row.sent_bytes is None else f"{row.sent_bytes / 2**20:.1f}",
            f"{row.loss:.5f}{'' if row.agrees is not False else ' (differs)'}",
        )
    return table


def _ratios(ratios: list[Ratio]) -> Table:
    table = _table("peer / ours, same sharding", "ours", "peer", "time", "CPU time", "peak memory")
    for ratio in ratios:
        table.add_row(
            ratio.ours, ratio.peer, _times(ratio.seconds), _times(ratio.cpu_seconds), _times(ratio.peak_bytes)
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="right" if other != "peer" else "left")
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"


def _times(factor: float | None) -> str:
    return "-" if factor is None else f"{factor:.2f}"
