"""`shardwise convert`: a checkpoint in another format, or a DeepSpeed config as a plan."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from shardwise.errors import ConfigError

TARGETS = ("hf", "shardwise", "dcp")
DTYPES = ("fp32", "bf16", "fp16")
"""Those of `formats/conversion.py`, which imports torch, while --help must be fast. A test compares them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("source", type=Path, metavar="IN", help="what `shardwise inspect` reads; or a DeepSpeed config, a JSON file")
    option("out", type=Path, metavar="OUT", help="a folder that is not there yet; of a config, a .yaml file")
    option("--to", choices=TARGETS, help="hf: from_pretrained; shardwise: engine.resume; dcp: FSDP2")
    option("--world", type=int, default=1, metavar="N", help="of a config: how many ranks there are (default: 1)")
    option("--dtype", choices=DTYPES, help="of floating parameters (default: as they are)")
    option("--weights-only", action="store_true", help="leave the optimizer, the step and the script's state behind")
    option(
        "--config", type=Path, metavar="PATH", help="a config.json of Hugging Face, or a folder with one, to go along"
    )
    option("--max-file-size", default="5GiB", metavar="SIZE", help="split files at this size (default: 5GiB)")
    option("--dry-run", action="store_true", help="print what would be written, and write nothing")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done. Raises `ShardwiseError` with the reason if that is impossible."""
    is_config = args.out.suffix in (".yaml", ".yml") and args.to is None
    if args.to is None and not is_config:
        raise ConfigError("Say --to and one of " + ", ".join(TARGETS) + "; for a DeepSpeed config end OUT in .yaml.")
    verb = "plan_file" if is_config else "conversion"
    status: int = importlib.import_module(f"shardwise.cli.{verb}").run(args)
    return status
