"""`shardwise bench`: measures this machine; in a checkout of the source, also races against the peers."""

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
"""Where `make bench` installs the peers, below the checkout."""
OF_THIS_MACHINE = ("disk", "host", "links")
"""Programs that need no checkout."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "program",
        help="of this machine: disk, host or links; in a checkout: peers, collectives, checkpoint, overhead, growth, "
        "compile, experts, pipeline, tensor, tiers, generation, horovod, integrations, mpi, hosts",
    )
    option("arguments", nargs=argparse.REMAINDER, help="its options; `shardwise bench disk --help` lists them")


def run(args: argparse.Namespace) -> int:
    """Measure this machine, or run a benchmark in the peers' environment if there is one. Returns the exit status."""
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
        "The benchmarks are not part of the installed package; they need a checkout of the source. "
        "Clone the repository and run `make bench` in it, which installs the peers too."
    )


def python_of(root: Path) -> Path:
    """The Python with the peers; else this one, in which peers that are not installed are skipped."""
    peers = root / PEERS_PYTHON
    return peers if peers.exists() else Path(sys.executable)
