"""The part of `shardwise inspect` that needs torch."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from shardwise.checkpoint.formats import Inspection, inspect, open_checkpoint
from shardwise.cli.console import SafeConsole
from shardwise.cli.print_inspection import print_inspection
from shardwise.cli.reading import bar

DAMAGED_STATUS = 1


def run(args: argparse.Namespace) -> int:
    """Print what is in the checkpoint; the status is 1 if damage was found."""
    found = _verified(args.path) if args.verify else inspect(args.path)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_inspection(found, SafeConsole(), full=args.full)
    return DAMAGED_STATUS if found.problems else 0


def _verified(path: Path) -> Inspection:
    num_bytes = sum(spec.num_bytes for spec in open_checkpoint(path).specs)
    with bar(Console(stderr=True), "reading", num_bytes) as tick:
        return inspect(path, verify=True, tick=tick)
