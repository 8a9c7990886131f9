"""`shardwise accelerate launch ...`: accepts a command line of Accelerate's launcher, with shardwise as the engine."""

from __future__ import annotations

import argparse

from shardwise.cli import launch
from shardwise.errors import LaunchError
from shardwise.integrations.accelerate_launch import add_options, read_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `launch`, and everything after it."""
    parser.add_argument("--dry-run", action="store_true", help="print what would be started; start nothing")
    parser.add_argument("verb", metavar="launch", help="the only supported command of Accelerate")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="options of accelerate launch, the script"
    )


def run(args: argparse.Namespace) -> int:
    """Run the job and return its exit status. Raises `ShardwiseError` for a command line that is not supported."""
    if args.verb != "launch":
        raise LaunchError(
            f"accelerate {args.verb} is a command of Accelerate itself. shardwise supports only "
            f"`shardwise accelerate launch script`."
        )
    options = argparse.ArgumentParser(prog="shardwise accelerate launch", allow_abbrev=False)
    add_options(options, args.rest)
    asked = options.parse_args(args.rest)
    config, words = read_options(asked)
    parser = argparse.ArgumentParser(prog="shardwise launch", allow_abbrev=False)
    launch.add_arguments(parser)
    dry = ["--dry-run"] if args.dry_run else []
    job = parser.parse_args([*dry, *words, *asked.command])
    launch.take_config(job, config, "accelerate launch")
    return launch.run(job)
