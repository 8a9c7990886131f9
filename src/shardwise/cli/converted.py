"""What `shardwise convert` does once its options are known."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from rich.console import Console

from shardwise.cli.inspected_print import print_conversion
from shardwise.cli.reading import bar
from shardwise.formats import convert
from shardwise.units import format_bytes


def run(args: argparse.Namespace) -> int:
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
