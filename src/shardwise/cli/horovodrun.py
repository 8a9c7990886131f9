"""`shardwise horovodrun`: accepts a command line of `horovodrun`, on this host or on others."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from shardwise.cli import launch
from shardwise.integrations.horovod.command_line import BUILD, add_horovodrun_arguments, launch_command
from shardwise.integrations.horovod.command_line_hosts import words_for_environment

add_arguments = add_horovodrun_arguments


def run(args: argparse.Namespace) -> int:
    """Run the job and return its exit status. Raises `ShardwiseError` for options that are not supported."""
    if args.check_build:
        print(BUILD.format(**_found()), end="")
        return 0
    understood = launch_command(args)
    for note in understood.notes:
        print(f"shardwise: {note}.", file=sys.stderr)
    os.environ.update(understood.environment)
    parser = argparse.ArgumentParser(prog="shardwise launch", allow_abbrev=False)
    launch.add_arguments(parser)
    if args.verbose:
        print(f"shardwise launch {' '.join(understood.launch)}", file=sys.stderr)
    variables = words_for_environment() if understood.uses_ssh else []
    return launch.run(parser.parse_args([*variables, *understood.launch]))


def _found() -> dict[str, str]:
    """An X for each framework that is installed."""
    found = {name: importlib.util.find_spec(name) is not None for name in ("torch", "tensorflow", "keras", "jax")}
    found["nccl"] = found["torch"] and _has_nccl()
    return {name: "X" if there else " " for name, there in found.items()}


def _has_nccl() -> bool:
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())
