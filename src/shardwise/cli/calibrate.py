"""`shardwise calibrate`: measures how fast this machine computes, copies and sends, for predictions."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from shardwise.system.calibration import default_path

EXAMPLES = """examples:
  shardwise calibrate                        measure this machine; takes a minute
  shardwise calibrate --disk /scratch        and the disk with this folder, for tiers
  shardwise calibrate --profile mine.yaml    write the profile to a file as well, to look at or to change

`shardwise explain --time` and `shardwise plan` use the result on this machine unless they are given --hardware."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--disk", metavar="FOLDER", help="measure the disk with this folder too")
    option("--profile", type=Path, metavar="FILE", help="write the profile to this .yaml file as well")
    option(
        "--calibration",
        type=Path,
        metavar="FILE",
        help=f"file to update, which `shardwise bench disk`, `host` and `links` share (default: {default_path()})",
    )
    option("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Measure, print, and save the results."""
    status: int = importlib.import_module("shardwise.cli.calibrating").run(args)  # needs torch, which --help does not
    return status
