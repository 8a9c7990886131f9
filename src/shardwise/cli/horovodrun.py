"""`shardwise horovodrun`: accepts a command line of `horovodrun`, for this host or others."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from shardwise.cli import launch
from shardwise.integrations.horovod.command_line import BUILD, add_horovodrun_arguments, launch_command
from shardwise.integrations.horovod.command_line_hosts import environment_arguments

add_arguments = add_horovodrun_arguments


def run(args: argparse.Namespace) -> int:
    """Run the job and return its exit status. Raises `ShardwiseError` for options that are not supported."""
    if args.check_build:
        print(BUILD.format(**_check_marks()), end="")
        return 0
    command = launch_command(args)
    for note in command.notes:
        print(f"shardwise: {note}.", file=sys.stderr)
    os.environ.update(command.environment)
    parser = argparse.ArgumentParser(prog="shardwise launch", allow_abbrev=False)
    launch.add_arguments(parser)
    if args.verbose:
        print(f"shardwise launch {' '.join(command.launch)}", file=sys.stderr)
    environment = environment_arguments() if command.uses_ssh else []
    return launch.run(parser.parse_args([*environment, *command.launch]))


def _check_marks() -> dict[str, str]:
    """An X for each framework that is installed."""
    installed = {name: importlib.util.find_spec(name) is not None for name in ("torch", "tensorflow", "keras", "jax")}
    installed["nccl"] = installed["torch"] and _has_nccl()
    return {name: "X" if is_installed else " " for name, is_installed in installed.items()}


def _has_nccl() -> bool:
    import torch

    return bool(torch.distributed.is_available() and torch.distributed.is_nccl_available())
