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
from shardwise.system.calibration import default_path
from shardwise.system.import_path import python_path
from shardwise.system.units import parse_bytes

PEERS_PYTHON = Path(".venv-bench/bin/python")
"""Where `make bench` installs the other libraries, below the checkout."""
OF_THIS_MACHINE = {
    "disk": "Measure how fast a disk reads and writes, by block size and number of requests in flight.",
    "host": "Measure how fast memory is copied and AdamW updates parameters in it, by number of threads.",
    "links": "Measure the links between two ranks of this machine, and between host memory and the first GPU.",
}
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
        "overhead, growth, commits, compile, experts, pipeline, planner, smaller, tensor, tiers, generation, weights, "
        "horovod, integrations, mpi, hosts, islands, wires, learning, elastic",
    )
    option("arguments", nargs=argparse.REMAINDER, help="options of the program: see `shardwise bench disk --help`")


def run(args: argparse.Namespace) -> int:
    """Measure this machine, or run a benchmark, in the environment of `make bench` if there is one. Returns the exit
    status."""
    if args.program in OF_THIS_MACHINE:
        options = _parser_of(args.program).parse_args(args.arguments)  # before torch is imported: it may ask for help
        status: int = importlib.import_module("shardwise.cli.tier_bench").run(args.program, options)
        return status
    root = find_checkout((Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents))
    environment = {**os.environ, "PYTHONPATH": python_path([str(root), str(root / "src")])}
    command = [str(python_of(root)), "-m", "benchmarks", args.program, *args.arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def _parser_of(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"shardwise bench {program}", description=OF_THIS_MACHINE[program])
    option = parser.add_argument
    if program == "disk":
        option("folder", help="any folder on the disk to measure")
        option("--size", type=_bytes, metavar="BYTES", help="size of the test file, at most (default: 512MiB)")
    option("--quick", action="store_true", help="measure fewer settings, for a rough result")
    option("--json", action="store_true", help="print JSON")
    option("--calibration", type=Path, metavar="FILE", help=f"file to update (default: {default_path()})")
    return parser


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
