"""`shardwise inspect`: prints what is in a checkpoint of any known format."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path


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
    """Print what is in the checkpoint; 1 if it is damaged."""
    # Imported here because it needs torch, while --help must be fast.
    status: int = importlib.import_module("shardwise.cli.inspection").run(args)
    return status
