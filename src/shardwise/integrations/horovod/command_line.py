"""Translates command lines of `horovodrun` into those of `shardwise launch`."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import LaunchError
from shardwise.integrations.horovod.command_line_hosts import (
    BY_SSH,
    NamedHosts,
    named_hosts,
    ssh_options,
    words_for_ssh,
)

# Options and the variables that ranks read.
_VARIABLES = {
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}
_ONE_HOST = "all ranks are on this host"
_NO_CYCLES = "collectives run when they are ready, not in cycles"
_NOTHING_TO_TUNE = "nothing needs tuning"
_NO_HIERARCHY = "ranks of one host share memory anyway"
_WITHOUT_EFFECT = {
    "--gloo": (0, "gloo is used between hosts anyway"),
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
    "--thread-affinity": (1, "threads are not bound"),
    "--gloo-timeout-seconds": (1, "a lost rank is detected by its connection"),
    "--mpi-threads-disable": (0, "MPI is not used"),
    "--no-mpi-threads-disable": (0, "MPI is not used"),
    "--start-timeout": (1, _ONE_HOST),
    "--ssh-port": (1, _ONE_HOST),
    "--ssh-identity-file": (1, _ONE_HOST),
    "--network-interfaces": (1, _ONE_HOST),
    "--elastic-timeout": (1, _ONE_HOST),
    "--tcp": (0, "MPI is not used"),
    "--binding-args": (1, "MPI is not used"),
    "--prefix-output-with-timestamp": (0, "lines are prefixed by their rank"),
    "--log-level": (1, "shardwise logs by Python's logging, as `shardwise`"),
    "--log-with-timestamp": (0, "shardwise logs by Python's logging, as `shardwise`"),
    "--log-without-timestamp": (0, "shardwise logs by Python's logging, as `shardwise`"),
    "--stall-check": (0, "missing ranks are always reported"),
}
_MANY_SECONDS = 10**9
_REFUSED = {
    "--mpi": (0, "Ranks are started by MPI with `mpirun -np N python train.py`, not from here. Leave --mpi out."),
    "--mpi-args": (1, "Ranks are started by MPI with `mpirun`, not from here. Leave --mpi-args out."),
    "--jsrun": (0, "jsrun is not supported. Start the script itself by jsrun, with torchrun's variables set."),
    "--config-file": (1, "A file of horovodrun's options is not read. Give them on the command line."),
    "--slots-per-host": (1, "Let the script of --host-discovery-script print `host:slots`, and leave it out."),
}


@dataclass
class LaunchCommand:
    """A command line of `horovodrun`, translated."""

    launch: list[str]
    """Arguments of `shardwise launch`."""
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Options without an effect, with the reason."""
    uses_ssh: bool = False
    """Whether ranks are on other hosts, which get the environment from here."""
    num_ranks: int = 0
    """On all hosts."""


def add_horovodrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Horovod's options, including those that have no effect or are refused."""
    parser.usage = "%(prog)s [options] [python] script.py [arguments of the script]"
    option = parser.add_argument
    option("-np", "--num-proc", type=int, metavar="N", help="number of ranks")
    option(
        "-H",
        "--hosts",
        metavar="HOST:N,...",
        help="hosts and ranks, over ssh, such as a:4,b:4 (default: this host)",
    )
    option("-hostfile", "--hostfile", type=Path, metavar="FILE", help="the same from a file, one host per line")
    option("--check-build", action="store_true", help="print the available frameworks, and start nothing")
    option("--output-filename", metavar="DIR", help="also write each rank's stdout and stderr to files in DIR")
    option("--fusion-threshold-mb", type=float, metavar="MB", help="largest size of fused all-reduces")
    option("--disable-cache", action="store_true", help="do not cache the negotiation of collectives")
    option("--no-stall-check", action="store_true", help="do not report stalled ranks")
    option("--reset-limit", type=int, metavar="N", help="restarts after a failure; if elastic, replacements")
    option("--min-np", "--min-num-proc", type=int, metavar="N", help="elastic: minimum number of ranks")
    option("--host-discovery-script", metavar="CMD", help="elastic: prints the present hosts as lines `host:slots`")
    option("--blacklist-cooldown-range", type=float, nargs=2, metavar=("MIN", "MAX"), help=argparse.SUPPRESS)
    option("--max-np", "--max-num-proc", type=int, metavar="N", help="elastic: maximum number of ranks (default: -np)")
    option("--verbose", action="store_true", help="print the equivalent `shardwise launch` command")
    option("-p", dest="ssh_port", help=argparse.SUPPRESS)
    option("-i", dest="ssh_identity_file", help=argparse.SUPPRESS)
    for name, variable in _VARIABLES.items():
        option(name, metavar="X", help=f"set {variable}")
    for name, (count, _) in {**_WITHOUT_EFFECT, **_REFUSED}.items():
        if count:
            option(name, nargs=count if count > 1 else None, help=argparse.SUPPRESS)
        else:
            option(name, action="store_true", help=argparse.SUPPRESS)
    option("command", nargs=argparse.REMAINDER, metavar="python script.py", help="the script, and its arguments")


def launch_command(args: argparse.Namespace) -> LaunchCommand:
    """Translate the options. Raises `LaunchError` for one that is not supported."""
    for name, (_, why) in _REFUSED.items():
        if _given(args, name):
            raise LaunchError(f"{name}: {why}")
    understood = _start(args, named_hosts(args.hosts, args.hostfile))
    for name, why in ((name, why) for name, (_, why) in _WITHOUT_EFFECT.items() if _given(args, name)):
        if not (understood.uses_ssh and name in BY_SSH):
            understood.notes.append(f"{name} has no effect: {why}")
    if args.output_filename is not None:
        understood.launch += ["--log-dir", args.output_filename]
    understood.launch += _elastic(args, understood)
    understood.environment = _environment(args)
    understood.launch += _script(args.command)
    return understood


def _elastic(args: argparse.Namespace, understood: LaunchCommand) -> list[str]:
    """Arguments for elastic jobs, or for restarts."""
    limit = args.reset_limit
    if args.min_np is None and args.max_np is None and args.host_discovery_script is None:
        return [] if limit is None else ["--max-restarts", str(limit)]
    least = args.min_np or understood.num_ranks
    most = args.max_np or max(understood.num_ranks, least)
    words = ["--elastic", f"{least}:{most}"]
    if args.blacklist_cooldown_range is not None:
        if understood.uses_ssh:
            words += ["--cooldown", f"{args.blacklist_cooldown_range[0]:g}"]
        else:
            understood.notes.append("--blacklist-cooldown-range has no effect: all ranks are on this host")
    return words if limit is None else [*words, "--retries", f"{limit}:{_MANY_SECONDS}"]


def _environment(args: argparse.Namespace) -> dict[str, str]:
    given = {variable: str(_given(args, name)) for name, variable in _VARIABLES.items() if _given(args, name)}
    if args.fusion_threshold_mb is not None:
        given["HOROVOD_FUSION_THRESHOLD"] = str(int(args.fusion_threshold_mb * 2**20))
    if args.disable_cache:
        given["HOROVOD_CACHE_CAPACITY"] = "0"
    if args.no_stall_check:
        given["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    return given


def _given(args: argparse.Namespace, name: str) -> object:
    return getattr(args, name.lstrip("-").replace("-", "_"))


def _start(args: argparse.Namespace, hosts: NamedHosts | None) -> LaunchCommand:
    """Arguments for the number of ranks and their hosts."""
    if args.host_discovery_script is not None:
        if hosts is not None:
            raise LaunchError("--host-discovery-script names the hosts. Leave out -H and --hostfile.")
        words = ["--where", "ssh", "--host-discovery-script", args.host_discovery_script, *ssh_options(args)]
        return LaunchCommand(["--as-horovod", *words], uses_ssh=True, num_ranks=args.num_proc or 1)
    nproc = args.num_proc if args.num_proc is not None or hosts is None else hosts.num_slots
    if nproc is None:
        raise LaunchError("Give the number of ranks: -np 2.")
    if hosts is not None and nproc > hosts.num_slots:
        raise LaunchError(f"-np {nproc} is more than the {hosts.num_slots} slots of the hosts.")
    filled = None if hosts is None else hosts.filled(nproc)
    if filled is None or not filled.is_elsewhere:
        return LaunchCommand(["--as-horovod", "--nproc", str(nproc)], num_ranks=nproc)
    return LaunchCommand(["--as-horovod", *words_for_ssh(filled, args)], uses_ssh=True, num_ranks=nproc)


def _script(command: list[str]) -> list[str]:
    """The script without the interpreter, which is that of the launcher."""
    words = command[1:] if command[:1] == ["--"] else list(command)
    if words and re.fullmatch(r"python[0-9.]*", Path(words[0]).name):
        words = words[1:]
        while words and words[0] == "-u":
            words = words[1:]
        if words[:1] == ["-m"]:
            return ["--module", *words[1:]]
    if not words or words[0].startswith("-"):
        raise LaunchError("Give a Python script after the options: shardwise horovodrun -np 2 python train.py.")
    return words


BUILD = """shardwise, in the place of Horovod

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
