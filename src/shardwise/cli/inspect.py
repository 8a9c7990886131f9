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
        help="a shardwise checkpoint, a folder of them, or a Hugging Face, DCP or DeepSpeed checkpoint",
    )
    parser.add_argument("--verify", action="store_true", help="read every tensor and check its checksum")
    parser.add_argument("--full", action="store_true", help="print the whole list of tensors and files")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print what is in the checkpoint; 1 if it is damaged."""
    # Imported here because it needs torch, while --help must be fast.
    status: int = importlib.import_module("shardwise.cli.inspection").run(args)
    return status
