"""`shardwise doctor`: checks whether this machine is ready to train, and says how to fix what is not."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.cli import checks, host_checks, host_facts
from shardwise.cli.checks import Check
from shardwise.cli.console import console_for_output, waiting_for
from shardwise.cli.loopback import run_loopback
from shardwise.cli.memory_sharing import obstacle_to_sharing
from shardwise.cli.mpi import examine_mpi, mpi_facts
from shardwise.cli.nccl import check_nccl, examine_gpus
from shardwise.cli.remote import SSH, Remote
from shardwise.cli.several_hosts import examine_hosts
from shardwise.errors import ConfigError
from shardwise.launch.hosts.facts import interfaces
from shardwise.system.machine import Cgroups, TorchFacts, host_memory, num_cores

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


EXAMPLES = """examples:
  shardwise doctor                              this machine
  shardwise doctor --plan plan.yaml --world 8   also problems of a plan on this machine
  shardwise doctor --hosts gpu1,gpu2            also other hosts, and the links between them"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--json", action="store_true", help="print JSON instead of a table")
    option(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time limit for starting and connecting two processes, or hosts (default: 30)",
    )
    option("--plan", metavar="PLAN", help="also check this plan on this machine: a preset or a file")
    option("--world", type=int, metavar="N", help="number of ranks for --plan (default: one per GPU, else 2)")
    option("--hosts", metavar="A,B,...", help="also check these hosts, and measure the links between them")
    option("--ssh", default=SSH, metavar="COMMAND", help=f"how to run a command on a host (default: {SSH})")
    option("--python", default=sys.executable, metavar="PATH", help="Python on the hosts (default: this path)")
    option("--port", type=int, default=0, metavar="P", help="port of the first host for --hosts (default: a free one)")
    option(
        "--folder",
        action="append",
        default=[],
        metavar="DIR",
        help="also measure the disk with this folder, which every host must have; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Run all checks and print the results; 1 if any fails, else 0."""
    hosts = _hosts_of(args)
    shell = _shell(args.ssh) if hosts else ()
    _check_numbers(args, hosts)
    answers = [*examine(args.timeout), *_of_folders([tempfile.gettempdir(), *args.folder])]
    if args.plan is not None:
        answers += _of_plan(args.plan, args.world)
    if hosts:
        remote = Remote(shell, args.python, args.timeout)
        with waiting_for(f"{', '.join(hosts)}, at most {args.timeout:g} s for each step"):
            answers += examine_hosts(hosts, remote, args.folder, args.port)
            if len(hosts) > 1 and Check("hosts", "ok", f"reached {', '.join(hosts)}") in answers:
                answers += examine_mpi(mpi_facts(), args.timeout, hosts)
    healthy = all(answer.status != "fail" for answer in answers)
    if args.json:
        print(json.dumps({"healthy": healthy, "checks": [asdict(answer) for answer in answers]}, indent=2))
    else:
        print_table(answers, console_for_output())
    return 0 if healthy else 1


def _hosts_of(args: argparse.Namespace) -> list[str]:
    hosts = [host.strip() for host in (args.hosts or "").split(",") if host.strip()]
    if len(set(hosts)) != len(hosts):
        raise ConfigError(f"--hosts {args.hosts} names a host twice; name each once.")
    strange = [host for host in hosts if host.startswith("-")]
    if strange:
        raise ConfigError(f"--hosts: {strange[0]!r} is an option, not a host.")
    return hosts


def _check_numbers(args: argparse.Namespace, hosts: list[str]) -> None:
    """Raise `ConfigError` for those that are impossible, or are for nothing, before anything is measured."""
    if args.world is not None and args.plan is None:
        raise ConfigError(f"--world {args.world} is the number of ranks for --plan; give that too, or leave it out.")
    if args.port and not hosts:
        raise ConfigError(f"--port {args.port} is a port of the first host of --hosts; give that too, or leave it out.")
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port is {args.port}; give a number from 1 to 65535, or remove it to use a free one.")
    if not 0 < args.timeout < 1e6:
        raise ConfigError(f"--timeout is {args.timeout:g}; give more than 0 seconds, and a finite number.")


def _shell(command: str) -> tuple[str, ...]:
    """`--ssh` as a list of arguments. Raises `ConfigError` if it cannot be run."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--ssh {command!r} cannot be read: {error}.") from error
    if not words or shutil.which(words[0]) is None:
        name = words[0] if words else command
        raise ConfigError(f"--ssh: this machine has no command {name!r}. Install an ssh client, or give its path.")
    return words


def examine(timeout_seconds: float) -> Iterator[Check]:
    """Every check of this machine, in the order in which problems should be fixed."""
    with waiting_for("torch to be imported"):
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
        yield checks.check_bf16(facts.bf16_ratio)
        yield checks.check_backends(facts)
        yield checks.check_gpus(facts)
        if "gloo" in facts.backends:
            with waiting_for(f"two processes to connect, at most {timeout_seconds:g} s"):
                meeting = run_loopback(timeout_seconds)
            yield checks.check_loopback(meeting)
        if facts.gpus and "nccl" in facts.backends:
            yield check_nccl(facts, interfaces(), os.environ)
            with waiting_for(f"the GPUs to exchange data, at most {timeout_seconds:g} s"):
                yield from examine_gpus(len(facts.gpus), timeout_seconds)
        yield host_checks.check_driver(host_facts.driver_version(), facts)
    yield _ask_temp()
    yield from _of_host(timeout_seconds)


def _of_host(timeout_seconds: float) -> Iterator[Check]:
    has_rdma = Path("/sys/class/infiniband").is_dir()
    yield host_checks.check_limits(host_facts.limits(), has_rdma=has_rdma)
    networks = [one for one in interfaces() if one.is_ipv4]
    yield host_checks.check_network(networks, host_facts.address_of_own_name(), os.environ)
    with waiting_for(f"mpirun to start two ranks, at most {timeout_seconds:g} s"):
        yield from examine_mpi(mpi_facts(), timeout_seconds)
    yield host_checks.check_clock(host_facts.clock_is_synchronized())
    yield host_checks.check_versions(host_facts.conflicts(_requirements()))
    yield host_checks.check_leftovers(host_facts.leftovers(Path(tempfile.gettempdir())))


def _requirements() -> list[str]:
    """The requirements of shardwise; empty if it runs from its source without being installed."""
    try:
        return metadata.requires("shardwise") or []
    except metadata.PackageNotFoundError:
        return []


def _of_folders(folders: list[str]) -> Iterator[Check]:
    for folder in dict.fromkeys(folders):
        try:
            with waiting_for(f"the disk of {folder}"):
                rates: host_facts.DiskRates | str = host_facts.disk_rates(Path(folder))
        except OSError as error:
            rates = error.strerror or str(error)
        yield host_checks.check_disk(folder, rates)


def _of_plan(source: str, world_size: int | None) -> list[Check]:
    if world_size is not None and world_size < 1:
        raise ConfigError(f"--world is {world_size}; give 1 or more.")
    facts = _ask_torch()
    known = facts if isinstance(facts, TorchFacts) else TorchFacts("", "")
    from shardwise.cli.plan_lint import lint  # see [Note: late imports] in cli/launch.py

    return lint(source, world_size or len(known.gpus) or 2, known, num_cores())


def print_table(answers: list[Check], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("check", "", "found", "note"):
        table.add_column(column, overflow="fold")
    for answer in answers:
        mark = Text(answer.status, style=_COLOURS[answer.status])
        table.add_row(Text(answer.name), mark, Text(answer.found), Text(answer.cure))
    console.print(table)
    num_failed = sum(answer.status == "fail" for answer in answers)
    console.print(f"\n{num_failed} of {len(answers)} checks failed." if num_failed else "\nReady to train.")


def _ask_torch() -> TorchFacts | str:
    """Torch's facts, or the reason why it cannot be imported, which doctor has to report rather than raise."""
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
