"""`shardwise top RUN`: shows a run live: loss, throughput, memory, and which rank is slow."""

from __future__ import annotations

import argparse
import time

from rich.console import Console
from rich.live import Live

from shardwise.cli.console import console_for_output
from shardwise.cli.print_run import page
from shardwise.observe.run_view import RunReader, as_json, read_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run (the key `run` of its plan), or its record.jsonl")
    parser.add_argument("--once", action="store_true", help="print once and exit")
    parser.add_argument("--json", action="store_true", help="print JSON once and exit")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="refresh interval (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Show the run until it is over, or until Ctrl-C; 1 if it failed or crashed."""
    view = read_run(args.run)
    if args.json:
        print(as_json(view))
        return _status(view.status)
    console = console_for_output()
    if args.once or not console.is_terminal:
        console.print(page(view))
        return _status(view.status)
    return _status(follow(args.run, max(0.1, args.every), console))


def follow(run: str, every_seconds: float, console: Console) -> str:
    """Show the run repeatedly until it is over; returns its final status."""
    reader = RunReader(run)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view = reader.read()
            live.update(page(view, console.height), refresh=True)
            if view.status != "running":
                return view.status
            time.sleep(every_seconds)


def _status(status: str) -> int:
    return int(status in ("failed", "crashed"))
