"""Translates `horovodrun`'s options to those of `shardwise launch`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.integrations.horovod.command_line_hosts import (
    SSH_OPTIONS,
    Hosts,
    parse_hosts,
    ssh_arguments,
    ssh_options,
)

VERSION = "0.28.1"
"""The version of Horovod whose API and options these are."""
_VARIABLES = {
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}
"""Options whose value ranks read from an environment variable."""
_ONE_HOST = "it concerns other hosts, and all ranks are on this host"
_LAUNCHER_TIMEOUTS = "the launcher waits for ranks with its own timeouts"
_NO_CYCLES = "collectives are executed when they are ready, not in cycles"
_NOTHING_TO_TUNE = "there is nothing to tune"
_NO_HIERARCHY = "ranks of one host always use shared memory"
_NO_MPI = "MPI is not used"
_PYTHON_LOGGING = "shardwise uses Python's logging, with the logger `shardwise`"
IGNORED = {
    "--gloo": (0, "gloo is always used between hosts"),
    "--cycle-time-ms": (1, _NO_CYCLES),
    "--timeline-mark-cycles": (0, _NO_CYCLES),
    "--no-timeline-mark-cycles": (0, _NO_CYCLES),
    "--hierarchical-allreduce": (0, _NO_HIERARCHY),
    "--no-hierarchical-allreduce": (0, _NO_HIERARCHY),
    "--hierarchical-allgather": (0, _NO_HIERARCHY),
    "--no-hierarchical-allgather": (0, _NO_HIERARCHY),
    "--torus-allreduce": (0, _NO_HIERARCHY),
    "--no-torus-allreduce": (0, _NO_HIERARCHY),
    "--autotune": (0, _NOTHING_TO_TUNE),
    "--no-autotune": (0, _NOTHING_TO_TUNE),
    "--autotune-log-file": (1, _NOTHING_TO_TUNE),
    "--autotune-warmup-samples": (1, _NOTHING_TO_TUNE),
    "--autotune-steps-per-sample": (1, _NOTHING_TO_TUNE),
    "--autotune-bayes-opt-max-samples": (1, _NOTHING_TO_TUNE),
    "--autotune-gaussian-process-noise": (1, _NOTHING_TO_TUNE),
    "--num-nccl-streams": (1, "NCCL has one stream for gathers and one for reductions"),
    "--thread-affinity": (1, "threads are not bound to cores"),
    "--gloo-timeout-seconds": (1, "a lost rank is noticed by its closed connection"),
    "--mpi-threads-disable": (0, _NO_MPI),
    "--no-mpi-threads-disable": (0, _NO_MPI),
    "--start-timeout": (1, _LAUNCHER_TIMEOUTS),
    "--ssh-port": (1, _ONE_HOST),
    "--ssh-identity-file": (1, _ONE_HOST),
    "--network-interfaces": (1, _ONE_HOST),
    "--elastic-timeout": (1, _LAUNCHER_TIMEOUTS),
    "--tcp": (0, _NO_MPI),
    "--binding-args": (1, _NO_MPI),
    "--prefix-output-with-timestamp": (0, "lines are prefixed by their rank"),
    "--log-level": (1, _PYTHON_LOGGING),
    "--log-with-timestamp": (0, _PYTHON_LOGGING),
    "--log-without-timestamp": (0, _PYTHON_LOGGING),
    "--stall-check": (0, "stalled ranks are always reported"),
}
"""Options without effect: the number of their arguments, and the reason."""
_OTHER_NAMES = {
    "--network-interfaces": ("--network-interface",),
    "--prefix-output-with-timestamp": ("-prefix-timestamp",),
    "--log-without-timestamp": ("--log-hide-timestamp",),
    "--log-with-timestamp": ("--no-log-hide-timestamp",),
}
"""Older and shorter names of options."""
_RETRY_WINDOW_SECONDS = 10**9
"""Horovod's `--reset-limit` counts over the whole job."""
REFUSED = {
    "--mpi": (0, "MPI is not supported here. To start ranks by MPI, use `mpirun -np N python train.py`."),
    "--mpi-args": (1, "MPI is not supported here. To start ranks by MPI, use `mpirun`."),
    "--jsrun": (0, "jsrun is not supported here. Start the script itself by jsrun, with torchrun's variables set."),
    "--config-file": (1, "A file of options is not supported. Pass them on the command line."),
    "--slots-per-host": (1, "Let the script of --host-discovery-script print `host:slots` instead."),
}
"""Options that are refused: the number of their arguments, and an alternative."""


@dataclass
class LaunchCommand:
    """A command line of `horovodrun` in shardwise's terms."""

    launch: list[str]
    """Arguments for `shardwise launch`."""
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """The options without effect, and why."""
    uses_ssh: bool = False
    """Whether there are ranks on other hosts. They get the environment of this process."""
    num_ranks: int = 0
    """The number of ranks on all hosts."""


def add_horovodrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Add all options of `horovodrun`, including those that are ignored or refused."""
    option = parser.add_argument
    option("-np", "--num-proc", type=int, metavar="N", help="ranks to start")
    option("-H", "--hosts", metavar="HOST:N,...", help="hosts and slots: a:4,b:4 (default: this host)")
    option("-hostfile", "--hostfile", type=Path, metavar="FILE", help="a file of hosts, one per line: a slots=4")
    option("-v", "--version", action="version", version=f"{VERSION} (by shardwise)")
    option("-cb", "--check-build", action="store_true", help="print the available frameworks and start nothing")
    option("--output-filename", metavar="DIR", help="also write each rank's stdout and stderr to this folder")
    option("--fusion-threshold-mb", type=float, metavar="MB", help="maximum size of fused all-reduces")
    option("--disable-cache", action="store_true", help="do not cache messages of the negotiation")
    option("--no-stall-check", action="store_true", help="do not report stalled ranks")
    option("--reset-limit", type=int, metavar="N", help="restarts after a failure; if elastic, new ranks")
    option("--min-np", "--min-num-proc", type=int, metavar="N", help="elastic: minimum number of ranks")
    option("--host-discovery-script", metavar="CMD", help="elastic: prints `host:slots`; run repeatedly")
    option("--blacklist-cooldown-range", type=float, nargs=2, metavar=("MIN", "MAX"), help=argparse.SUPPRESS)
    option("--max-np", "--max-num-proc", type=int, metavar="N", help="elastic: maximum number of ranks (default: -np)")
    option("--verbose", action="store_true", help="print the command line of `shardwise launch`")
    option("-p", dest="ssh_port", help=argparse.SUPPRESS)
    option("-i", dest="ssh_identity_file", help=argparse.SUPPRESS)
    for name in _VARIABLES:
        option(name, metavar="X")
    for name, (count, _) in {**IGNORED, **REFUSED}.items():
        names = (name, *_OTHER_NAMES.get(name, ()))
        if count:
            option(*names, nargs=count if count > 1 else None, help=argparse.SUPPRESS)
        else:
            option(*names, action="store_true", help=argparse.SUPPRESS)
    option("command", nargs=argparse.REMAINDER, metavar="python script.py", help="the script, and its arguments")


def launch_command(args: argparse.Namespace) -> LaunchCommand:
    """Translate the command line. Raises `LaunchError` for options that are refused."""
    for name, (_, why) in REFUSED.items():
        if _value(args, name):
            raise LaunchError(f"{name}: {why}")
    command = _command_for_hosts(args, parse_hosts(args.hosts, args.hostfile))
    for name, (_, why) in IGNORED.items():
        if _value(args, name) and not (command.uses_ssh and name in SSH_OPTIONS):
            command.notes.append(f"{name} has no effect: {why}")
    if args.output_filename is not None:
        command.launch += ["--log-dir", args.output_filename]
    command.launch += _elastic_arguments(args, command)
    command.environment = _environment(args)
    command.launch += _script_arguments(args.command)
    return command


def _elastic_arguments(args: argparse.Namespace, command: LaunchCommand) -> list[str]:
    """Arguments for an elastic job, or for restarts."""
    limit = args.reset_limit
    if args.min_np is None and args.max_np is None and args.host_discovery_script is None:
        return [] if limit is None else ["--max-restarts", str(limit)]
    min_np = args.min_np or command.num_ranks
    max_np = args.max_np or max(command.num_ranks, min_np)
    arguments = ["--elastic", f"{min_np}:{max_np}"]
    if args.blacklist_cooldown_range is not None:
        if command.uses_ssh:
            arguments += ["--cooldown", f"{args.blacklist_cooldown_range[0]:g}"]
        else:
            command.notes.append("--blacklist-cooldown-range has no effect: it concerns other hosts")
    return arguments if limit is None else [*arguments, "--retries", f"{limit}:{_RETRY_WINDOW_SECONDS}"]


def _environment(args: argparse.Namespace) -> dict[str, str]:
    environment = {variable: str(_value(args, name)) for name, variable in _VARIABLES.items() if _value(args, name)}
    if args.fusion_threshold_mb is not None:
        environment["HOROVOD_FUSION_THRESHOLD"] = str(int(args.fusion_threshold_mb * 2**20))
    if args.disable_cache:
        environment["HOROVOD_CACHE_CAPACITY"] = "0"
    if args.no_stall_check:
        environment["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    return environment


def _value(args: argparse.Namespace, name: str) -> object:
    return getattr(args, name.lstrip("-").replace("-", "_"))


def _command_for_hosts(args: argparse.Namespace, hosts: Hosts | None) -> LaunchCommand:
    """The arguments for the number of ranks and their hosts."""
    if args.host_discovery_script is not None:
        if hosts is not None:
            raise LaunchError("--host-discovery-script names the hosts. Leave out -H and --hostfile.")
        arguments = ["--where", "ssh", "--host-discovery-script", args.host_discovery_script, *ssh_options(args)]
        return LaunchCommand(["--as-horovod", *arguments], uses_ssh=True, num_ranks=args.num_proc or 1)
    nproc = args.num_proc if args.num_proc is not None or hosts is None else hosts.num_slots
    if nproc is None:
        raise LaunchError("Pass the number of ranks: -np 2.")
    if hosts is not None and nproc > hosts.num_slots:
        raise LaunchError(f"-np {nproc} is more than the {hosts.num_slots} slots of the hosts.")
    used = None if hosts is None else hosts.filled(nproc)
    if used is None or not used.has_remote:
        return LaunchCommand(["--as-horovod", "--nproc", str(nproc)], num_ranks=nproc)
    return LaunchCommand(["--as-horovod", *ssh_arguments(used, args)], uses_ssh=True, num_ranks=nproc)


def _script_arguments(command: list[str]) -> list[str]:
    """The script without the interpreter: the launcher uses its own."""
    words = command[1:] if command[:1] == ["--"] else list(command)
    if words and re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        words = words[1:]
        while words and words[0] == "-u":
            words = words[1:]
        if words[:1] == ["-m"]:
            return ["--module", *words[1:]]
    if not words or words[0].startswith("-"):
        raise LaunchError("Pass a Python script after the options: shardwise horovodrun -np 2 python train.py.")
    return words


BUILD = """shardwise, instead of Horovod

Available frameworks:
    [{torch}] PyTorch
    [{tensorflow}] TensorFlow
    [{keras}] Keras
    [{jax}] JAX
    [ ] MXNet

Available controllers:
    [X] shardwise (TCP)

Available tensor operations:
    [X] shared memory
    [X] gloo
    [{nccl}] NCCL
"""
