"""`shardwise doctor`: is this machine fit to train on, and if not, what mends it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import checks
from shardwise.cli.checks import Check
from shardwise.cli.meeting import meet
from shardwise.cli.memory_sharing import obstacle_to_sharing
from shardwise.machine import Cgroups, TorchFacts, host_memory, num_cores

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long two processes may take to start and meet (default: 30)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask everything, print the answers; 1 if something fails, else 0."""
    answers = list(examine(args.timeout))
    healthy = all(answer.status != "fail" for answer in answers)
    if args.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(answer) for answer in answers]}, indent=2))
    else:
        print_table(answers, Console())
    return 0 if healthy else 1


def examine(timeout_seconds: float) -> Iterator[Check]:
    """Every check on the facts of this machine, in the order in which one would mend them."""
    facts = _ask_torch()
    yield checks.check_python(tuple(sys.version_info[:3]))
    yield checks.check_torch(facts)
    cgroups = Cgroups()
    yield checks.check_cores(num_cores(), cgroups.cpu_limit())
    yield checks.check_memory(cgroups.memory(host_memory()))
    yield _ask_shm(Path("/dev/shm"))
    yield checks.check_shared_memory(obstacle_to_sharing())
    yield checks.check_allocator(os.environ, platform.libc_ver()[0])
    yield checks.check_threads(os.environ, num_cores())
    if isinstance(facts, TorchFacts):
        yield checks.check_backends(facts)
        yield checks.check_gpus(facts)
        if "gloo" in facts.backends:
            yield checks.check_loopback(meet(timeout_seconds))
    yield _ask_temp()


def print_table(answers: list[Check], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found", "note"):
        table.add_column(column, overflow="fold")
    for answer in answers:
        mark = Text(answer.status, style=_COLOURS[answer.status])
        table.add_row(Text(answer.name), mark, Text(answer.found), Text(answer.cure))
    console.print(table)
    num_failed = sum(answer.status == "fail" for answer in answers)
    console.print(f"\n{num_failed} of {len(answers)} checks failed." if num_failed else "\nFit to train.")


def _ask_torch() -> TorchFacts | str:
    """Torch's facts, or why it cannot be imported; a broken install is just what doctor is asked about."""
    try:
        facts: TorchFacts = importlib.import_module("shardwise.cli.torch_facts").torch_facts()
    except (ImportError, OSError, AttributeError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    return facts


def _ask_shm(folder: Path) -> Check:
    if not folder.is_dir():
        return checks.check_shm(None, 0)
    usage = shutil.disk_usage(folder)
    return checks.check_shm(usage.total, usage.free)


def _ask_temp() -> Check:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"shardwise")
    except OSError:
        return checks.check_temp(os.environ.get("TMPDIR", "/tmp"), False, 0)
    folder = tempfile.gettempdir()
    return checks.check_temp(folder, True, shutil.disk_usage(folder).free)
