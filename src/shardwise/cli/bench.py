"""`shardwise bench`: measures this machine, or runs the benchmarks of a source checkout."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from shardwise.errors import LaunchError

PEERS_PYTHON = Path(".venv-bench/bin/python")
"""Where `make bench` installs the other libraries, below the checkout."""
OF_THIS_MACHINE = ("disk", "host", "links")
"""Programs that need no checkout."""
EXAMPLES = """examples:
  shardwise bench disk /scratch    read and write speed of the disk with this folder
  shardwise bench host             memory copies, and optimizer updates on the CPU
  shardwise bench links            between two ranks, and between host and GPU

`shardwise explain` uses these results to estimate the time of offload."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "program",
        help="disk, host or links measure this machine; in a source checkout also peers, collectives, checkpoint, "
        "overhead, growth, compile, experts, pipeline, planner, smaller, tensor, tiers, generation, weights, horovod, "
        "integrations, mpi, hosts, islands, wires, learning, elastic",
    )
    option("arguments", nargs=argparse.REMAINDER, help="options of the program: see `shardwise bench disk --help`")


def run(args: argparse.Namespace) -> int:
    """Measure this machine, or run a benchmark, in the environment of `make bench` if there is one. Returns the exit
    status."""
    if args.program in OF_THIS_MACHINE:
        status: int = importlib.import_module("shardwise.cli.tier_bench").run(args.program, args.arguments)
        return status
    root = find_checkout((Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents))
    paths = [str(root), str(root / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [str(python_of(root)), "-m", "benchmarks", args.program, *args.arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def find_checkout(folders: Iterable[Path]) -> Path:
    """The first of `folders` that is a checkout of shardwise. Raises `LaunchError` if none is."""
    for folder in folders:
        if (folder / "benchmarks" / "__main__.py").is_file() and (folder / "src" / "shardwise").is_dir():
            return folder
    raise LaunchError(
        "The benchmarks are not part of the installed package; they need a source checkout. Clone the repository and "
        "run `make bench` in it, which installs the other libraries too. Without a checkout there are disk, host and "
        "links."
    )


def python_of(root: Path) -> Path:
    """The Python of `make bench`; else this one, in which libraries that are not installed are skipped."""
    peers = root / PEERS_PYTHON
    return peers if peers.exists() else Path(sys.executable)
