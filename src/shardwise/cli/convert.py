"""`shardwise convert`: a checkpoint in another format."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from shardwise.cli.inspected_print import print_conversion
from shardwise.cli.reading import bar
from shardwise.formats import DTYPES, TARGETS, convert
from shardwise.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("source", type=Path, metavar="IN", help="what `shardwise inspect` reads")
    option("out", type=Path, metavar="OUT", help="a folder that is not there yet")
    option("--to", required=True, choices=TARGETS, help="hf: from_pretrained; shardwise: engine.resume; dcp: FSDP2")
    option("--dtype", choices=DTYPES, help="of floating parameters (default: as they are)")
    option("--weights-only", action="store_true", help="leave the optimizer, the step and the script's state behind")
    option(
        "--config", type=Path, metavar="PATH", help="a config.json of Hugging Face, or a folder with one, to go along"
    )
    option("--max-file-size", default="5GiB", metavar="SIZE", help="split files at this size (default: 5GiB)")
    option("--dry-run", action="store_true", help="print what would be written, and write nothing")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was done; a `ShardwiseError` says why not."""
    with ExitStack() as stack:
        done = convert(
            args.source,
            args.out,
            args.to,
            dtype=args.dtype,
            weights_only=args.weights_only,
            config=args.config,
            max_file_bytes=args.max_file_size,
            dry_run=args.dry_run,
            start=lambda plan: stack.enter_context(
                bar(Console(stderr=True), f"writing {format_bytes(plan.num_bytes)}", plan.num_bytes)
            ),
        )
    print_conversion(done, Console(), is_dry_run=args.dry_run)
    return 0
