"""`shardwise bench disk|host|links`: measures this machine; prints a table and updates the calibration file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwise.errors import ConfigError
from shardwise.fit.calibrate import disk, host, links
from shardwise.system.calibration import (
    Calibration,
    DiskFigures,
    HostFigures,
    LinkFigures,
    default_path,
    now,
    place_of,
    read_calibration,
    write_calibration,
)
from shardwise.system.machine import num_cores
from shardwise.system.safe_files import draft_beside
from shardwise.system.units import format_bytes, format_count

Rows = Sequence[Any]


def run(program: str, args: argparse.Namespace) -> int:
    """Measure, print, and save the results."""
    path = args.calibration or default_path()
    require_writable(path)  # this and a bad file are refused before anything is measured
    before = read_calibration(path)
    rows, best, after, words = _PROGRAMS[program](args, before)
    if args.json:
        found = {"rows": [asdict(row) for row in rows], "best": best, "calibration": str(path)}
        print(json.dumps(found, indent=1))
    else:
        console = Console(highlight=False)
        console.print(_TABLES[program](rows))
        console.print(f"\n{words}\n{path}", markup=False, soft_wrap=True)
    try:
        write_calibration(after, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}), so the figures above are not kept.") from error
    return 0


def require_writable(path: Path) -> None:
    """Raise `ConfigError` unless a calibration can be kept at `path`."""
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Name a file: --calibration {path / 'calibration.json'}.")
    probe = draft_beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error}), and the figures are to be kept there. Name another file with "
            f"--calibration FILE."
        ) from error


def _disk(args: argparse.Namespace, before: Calibration) -> tuple[Rows, dict[str, Any], Calibration, str]:
    folder = place_of(args.folder).resolve()
    grid = disk.Grid(disk.QUICK_BLOCKS, disk.QUICK_DEPTHS, 2**26, 0.3) if args.quick else disk.Grid()
    if args.size is not None:
        grid = replace(grid, file_bytes=args.size)
    rows = _with_progress("disk", grid.num_settings, lambda tell: disk.measure_disk(folder, grid, tell))
    best, figures = disk.best_of(rows), disk_figures(rows)
    words = (
        f"Best for {folder}: {best.depth} requests of {format_bytes(best.block_bytes)} at once, "
        f"{'past' if best.is_direct else 'through'} the page cache."
    )
    return rows, asdict(figures), replace(before, disks={**before.disks, str(folder): figures}), words


def _host(args: argparse.Namespace, before: Calibration) -> tuple[Rows, dict[str, Any], Calibration, str]:
    threads = [count for count in (1, 2, 4, 8, 16, 32, 64) if count < num_cores()] + [num_cores()]
    numel = host.QUICK_NUMEL if args.quick else host.NUMEL
    rows = _with_progress("host", len(threads), lambda tell: host.measure_host(threads, numel, tell))
    best, figures = host.best_of(rows), host_figures(rows)
    words = f"Best for an update on the host: {best.num_threads} thread{'s'[: best.num_threads > 1]}."
    return rows, asdict(figures), replace(before, memory=figures), words


def _links(args: argparse.Namespace, before: Calibration) -> tuple[Rows, dict[str, Any], Calibration, str]:
    num_bytes = links.QUICK_BYTES if args.quick else links.NUM_BYTES
    rows = _with_progress("links", 2, lambda tell: links.measure_links(num_bytes, tell))
    figures = link_figures(rows)
    has_device = figures.to_device_bytes_per_second > 0
    words = "" if has_device else "This machine has no device that torch can use."
    return rows, asdict(figures), replace(before, links=figures), words


def disk_figures(rows: Sequence[disk.DiskRow]) -> DiskFigures:
    best = disk.best_of(rows)
    rates = best.read_bytes_per_second, best.write_bytes_per_second
    return DiskFigures(*rates, best.depth, best.block_bytes, best.is_direct, now())


def host_figures(rows: Sequence[host.HostRow]) -> HostFigures:
    best = host.best_of(rows)
    copied = max(row.copy_bytes_per_second for row in rows)
    return HostFigures(copied, best.adam_elements_per_second, best.num_threads, now())


def link_figures(rows: Sequence[links.LinkRow]) -> LinkFigures:
    rates = {row.link: row.bytes_per_second for row in rows}
    on_device = rates.get(links.TO_DEVICE, 0.0), rates.get(links.FROM_DEVICE, 0.0)
    return LinkFigures(rates[links.SHARED], rates[links.MESSAGES], *on_device, now())


def _with_progress(what: str, num_steps: int, measure: Callable[[Callable[[Any], None]], Rows]) -> Rows:
    """Show a progress bar on stderr if it is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(what, total=num_steps)
        return measure(lambda _: progress.advance(task))


def _disk_table(rows: Sequence[disk.DiskRow]) -> Table:
    best = disk.best_of(rows)
    table = _table("block", "depth", "", "write /s", "read /s", "")
    for row in rows:
        kind = "direct" if row.is_direct else "cached"
        rates = (format_bytes(row.write_bytes_per_second), format_bytes(row.read_bytes_per_second))
        table.add_row(format_bytes(row.block_bytes), str(row.depth), kind, *rates, Text("best" if row is best else ""))
    return table


def _host_table(rows: Sequence[host.HostRow]) -> Table:
    table = _table("threads", "copied /s", "AdamW elements /s", "AdamW bytes /s", "over copying")
    for row in rows:
        over = row.adam_bytes_per_second / (2 * row.copy_bytes_per_second)
        table.add_row(
            str(row.num_threads),
            format_bytes(row.copy_bytes_per_second),
            format_count(row.adam_elements_per_second),
            format_bytes(row.adam_bytes_per_second),
            f"{over:.2f}",
        )
    return table


def _links_table(rows: Sequence[links.LinkRow]) -> Table:
    table = _table("link", "bytes", "/s")
    for row in rows:
        table.add_row(row.link, format_bytes(row.num_bytes), format_bytes(row.bytes_per_second))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right")
    return table


_PROGRAMS = {"disk": _disk, "host": _host, "links": _links}
_TABLES: dict[str, Callable[[Any], Table]] = {"disk": _disk_table, "host": _host_table, "links": _links_table}
