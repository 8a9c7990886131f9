"""The part of `shardwise convert` that needs torch: converts a checkpoint."""

from __future__ import annotations

import argparse

from rich.console import Console

from shardwise.checkpoint.formats import carry_out, plan_conversion
from shardwise.cli.console import SafeConsole
from shardwise.cli.print_inspection import print_conversion
from shardwise.cli.reading import bar
from shardwise.system.units import format_bytes


def run(args: argparse.Namespace) -> int:
    conversion = plan_conversion(
        args.source,
        args.out,
        args.to,
        dtype=args.dtype,
        weights_only=args.weights_only,
        config=args.config,
        max_file_bytes=args.max_file_size,
    )
    if not args.dry_run:
        title = f"writing {format_bytes(conversion.num_bytes)}"
        with bar(Console(stderr=True), title, conversion.num_bytes) as tick:
            carry_out(conversion, tick)
    print_conversion(conversion, SafeConsole(), is_dry_run=args.dry_run)
    return 0
