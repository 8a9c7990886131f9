"""`shardwise convert`: a checkpoint in another format, or a DeepSpeed config as a plan."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from shardwise.errors import ConfigError

TARGETS = ("hf", "shardwise", "dcp")
DTYPES = ("fp32", "bf16", "fp16")
"""Those of `checkpoint/formats/conversion.py`, which imports torch, while --help must be fast. A test compares them."""
EXAMPLES = """examples:
  shardwise convert run/checkpoints model --to hf               for from_pretrained
  shardwise convert ds_checkpoint resumed --to shardwise        continue a DeepSpeed run
  shardwise convert ds_config.json plan.yaml --world 8          a DeepSpeed config as a plan"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "source",
        type=Path,
        metavar="IN",
        help="a checkpoint that `shardwise inspect` can read, or a DeepSpeed config (.json)",
    )
    option("out", type=Path, metavar="OUT", help="a new folder; for a DeepSpeed config, a new .yaml file")
    option("--to", choices=TARGETS, help="hf: for from_pretrained; shardwise: for engine.resume; dcp: for FSDP2")
    option("--world", type=int, default=1, metavar="N", help="for a DeepSpeed config: number of ranks (default: 1)")
    option("--dtype", choices=DTYPES, help="dtype of floating-point parameters (default: unchanged)")
    option(
        "--weights-only",
        action="store_true",
        help="only parameters and buffers, without optimizer, step and user state",
    )
    option("--config", type=Path, metavar="PATH", help="Hugging Face config.json to copy along, or a folder with one")
    option("--max-file-size", default="5GiB", metavar="SIZE", help="largest size of a file (default: 5GiB)")
    option("--dry-run", action="store_true", help="print what would be written, and write nothing")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was written. Raises `ShardwiseError` with the reason if that is impossible."""
    is_config = args.out.suffix in (".yaml", ".yml") and args.to is None
    if args.to is None and not is_config:
        raise ConfigError(
            f"The format is unknown. Give --to with {', '.join(TARGETS)}. For a DeepSpeed config, end OUT in .yaml."
        )
    verb = "plan_file" if is_config else "conversion"
    status: int = importlib.import_module(f"shardwise.cli.{verb}").run(args)
    return status
