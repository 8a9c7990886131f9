"""`shardwise inspect`: what is in a checkpoint, whoever wrote it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from shardwise.cli.inspected_print import print_inspection
from shardwise.cli.reading import bar
from shardwise.formats import Inspection, inspect, open_checkpoint

DAMAGED_STATUS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        type=Path,
        metavar="CKPT",
        help="a checkpoint or run folder of shardwise, or a folder of Hugging Face, DCP or DeepSpeed",
    )
    parser.add_argument("--verify", action="store_true", help="read every tensor and compare checksums")
    parser.add_argument("--full", action="store_true", help="print all of a long list")
    parser.add_argument("--json", action="store_true", help="print JSON instead")


def run(args: argparse.Namespace) -> int:
    """Print what is in the checkpoint; 1 if `--verify` finds it damaged."""
    found = _verified(args.path) if args.verify else inspect(args.path)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_inspection(found, Console(), full=args.full)
    return DAMAGED_STATUS if found.problems else 0


def _verified(path: Path) -> Inspection:
    num_bytes = sum(spec.num_bytes for spec in open_checkpoint(path).specs)
    with bar(Console(stderr=True), "reading", num_bytes) as tick:
        return inspect(path, verify=True, tick=tick)
