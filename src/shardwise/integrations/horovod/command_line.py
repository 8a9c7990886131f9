"""What people type after `horovodrun`, as what they would type after `shardwise launch`."""

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

# Option, number of words after it, and the variable that ranks read, of what is a number of ours too.
_VARIABLES = {
    "--cache-capacity": "HOROVOD_CACHE_CAPACITY",
    "--timeline-filename": "HOROVOD_TIMELINE",
    "--stall-check-warning-time-seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "--stall-check-shutdown-time-seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
}
_RANKS_MEET = "ranks of one host meet by themselves"
_NO_CYCLES = "collectives are carried out when they are ready, not in cycles"
_NOTHING_TO_TUNE = "there is nothing to tune"
_NO_HIERARCHY = "ranks of one host share memory anyway"
_WITHOUT_MEANING = {
    "--gloo": (0, "gloo is what reaches other hosts anyway"),
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
    "--gloo-timeout-seconds": (1, "a rank that is gone is told by its connection"),
    "--mpi-threads-disable": (0, "no MPI is called"),
    "--no-mpi-threads-disable": (0, "no MPI is called"),
    "--start-timeout": (1, _RANKS_MEET),
    "--ssh-port": (1, _RANKS_MEET),
    "--ssh-identity-file": (1, _RANKS_MEET),
    "--network-interfaces": (1, _RANKS_MEET),
    "--elastic-timeout": (1, _RANKS_MEET),
    "--tcp": (0, "no MPI is called"),
    "--binding-args": (1, "no MPI is called"),
    "--prefix-output-with-timestamp": (0, "lines are prefixed by their rank"),
    "--log-level": (1, "shardwise logs by Python's logging, as `shardwise`"),
    "--log-with-timestamp": (0, "shardwise logs by Python's logging, as `shardwise`"),
    "--log-without-timestamp": (0, "shardwise logs by Python's logging, as `shardwise`"),
    "--stall-check": (0, "ranks that never come are reported anyway"),
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
    """What a command line of `horovodrun` comes to."""

    launch: list[str]
    """Words for `shardwise launch`."""
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What has no meaning here, and why."""
    uses_ssh: bool = False
    """Whether ranks are on other hosts, which get the environment from here."""
    num_ranks: int = 0
    """On all hosts together."""


def add_horovodrun_arguments(parser: argparse.ArgumentParser) -> None:
    """Horovod's own options, those without a meaning and those that are refused included."""
    option = parser.add_argument
    option("-np", "--num-proc", type=int, metavar="N", help="ranks to start")
    option("-H", "--hosts", metavar="HOST:N,...", help="where, by ssh: a:4,b:4 (default: this host)")
    option("-hostfile", "--hostfile", type=Path, metavar="FILE", help="the same, a host in each line")
    option("--check-build", action="store_true", help="print what there is, and start nothing")
    option("--output-filename", metavar="DIR", help="also write each rank's stdout and stderr there")
    option("--fusion-threshold-mb", type=float, metavar="MB", help="all-reduces that are ready go together, up to this")
    option("--disable-cache", action="store_true", help="send every message whole")
    option("--no-stall-check", action="store_true", help="do not report ranks that others wait for")
    option("--reset-limit", type=int, metavar="N", help="new attempts after a failure; if elastic, new ranks")
    option("--min-np", "--min-num-proc", type=int, metavar="N", help="elastic: the fewest ranks to go on with")
    option("--host-discovery-script", metavar="CMD", help="elastic: prints `host:slots`, asked again and again")
    option("--blacklist-cooldown-range", type=float, nargs=2, metavar=("MIN", "MAX"), help=argparse.SUPPRESS)
    option("--max-np", "--max-num-proc", type=int, metavar="N", help="elastic: the most ranks (default: -np)")
    option("--verbose", action="store_true", help="print what is started")
    option("-p", dest="ssh_port", help=argparse.SUPPRESS)
    option("-i", dest="ssh_identity_file", help=argparse.SUPPRESS)
    for name in _VARIABLES:
        option(name, metavar="X")
    for name, (count, _) in {**_WITHOUT_MEANING, **_REFUSED}.items():
        if count:
            option(name, nargs=count if count > 1 else None, help=argparse.SUPPRESS)
        else:
            option(name, action="store_true", help=argparse.SUPPRESS)
    option("command", nargs=argparse.REMAINDER, metavar="python script.py", help="the script, and its arguments")


def launch_command(args: argparse.Namespace) -> LaunchCommand:
    """Raises `LaunchError` for what is refused: by name, and before anything is started."""
    for name, (_, why) in _REFUSED.items():
        if _given(args, name):
            raise LaunchError(f"{name}: {why}")
    understood = _start(args, named_hosts(args.hosts, args.hostfile))
    for name, why in ((name, why) for name, (_, why) in _WITHOUT_MEANING.items() if _given(args, name)):
        if not (understood.uses_ssh and name in BY_SSH):
            understood.notes.append(f"{name} has no meaning here: {why}")
    if args.output_filename is not None:
        understood.launch += ["--log-dir", args.output_filename]
    understood.launch += _elastic(args, understood)
    understood.environment = _environment(args)
    understood.launch += _script(args.command)
    return understood


def _elastic(args: argparse.Namespace, understood: LaunchCommand) -> list[str]:
    """Words for ranks that come and go, or for new attempts."""
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
            understood.notes.append("--blacklist-cooldown-range has no meaning here: it is about other hosts")
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
    """Words that say how many ranks there are, and on which hosts."""
    if args.host_discovery_script is not None:
        if hosts is not None:
            raise LaunchError("--host-discovery-script names the hosts. Leave out -H and --hostfile.")
        words = ["--where", "ssh", "--host-discovery-script", args.host_discovery_script, *ssh_options(args)]
        return LaunchCommand(["--as-horovod", *words], uses_ssh=True, num_ranks=args.num_proc or 1)
    nproc = args.num_proc if args.num_proc is not None or hosts is None else hosts.num_slots
    if nproc is None:
        raise LaunchError("Give the number of ranks: -np 2.")
    if hosts is not None and nproc > hosts.num_slots:
        raise LaunchError(f"-np {nproc} is more than the {hosts.num_slots} slots that the hosts have.")
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
