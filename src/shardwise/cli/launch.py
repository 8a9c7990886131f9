"""`shardwise launch`: runs a script on several ranks, of this machine or of others.

[Note: late imports] What reads plans is imported by what needs it: pydantic and yaml take longer than all the rest of
`shardwise launch --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise import launch
from shardwise.cli import launch_places
from shardwise.cli.autotuning import NOT_ON_HOSTS, run_tuned
from shardwise.errors import LaunchError
from shardwise.launch.autoscale import parse_policy
from shardwise.launch.cores import BINDINGS
from shardwise.launch.job import Elastic, Job, describe

if TYPE_CHECKING:
    from shardwise.integrations.accelerate_config import AccelerateConfig

EXAMPLES = """examples:
  shardwise launch --nproc 2 train.py --lr 1e-3             options after the script are the script's own
  shardwise launch --nproc 4 --elastic 2:8 train.py         continue when ranks are lost
  shardwise launch --hosts gpu1:8,gpu2:8 train.py           two hosts, over ssh
  shardwise launch --where slurm --nodes 2 --nproc 8 train.py
  shardwise launch --shardwise zero3 finetune.py            an unmodified Trainer or Accelerate script"""


_STANDBY = "shardwise.launch.elastic.standby"
"""Run by the process that takes over when the launcher of an elastic job is killed."""
_OUTLIVE_LAUNCHERS = ("ssh", "pods", "k8s")
"""Where ranks are on several hosts, and can go on without their launcher."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `shardwise launch`; those after the script are the script's."""
    parser.usage = "%(prog)s [options] script [arguments of the script]"
    _add_options(parser)
    _add_script_options(parser)
    _add_elastic_options(parser)
    launch_places.add_arguments(parser)
    parser.set_defaults(machines=None)
    # PARSER is REMAINDER with at least one argument, and keeps a "--" among the script's own
    parser.add_argument("command", nargs=argparse.PARSER, metavar="script", help="the script, and its arguments")


def _add_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "--nproc",
        "-np",
        type=int,
        metavar="N",
        help="ranks per host (default: one per GPU, else 1; at least MIN with --elastic)",
    )
    option("--port", "--master_port", type=int, metavar="P", help="port of the rendezvous (default: a free one)")
    option(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts of all ranks after a failure (default: 0)"
    )
    option("--threads", type=int, metavar="N", help="CPU threads per rank (default: cores / ranks)")
    option(
        "--bind",
        "--numa-binding",
        type=lambda name: {"exclusive": "cores"}.get(name, name),
        choices=BINDINGS,
        default="none",
        help="bind each rank to cores of its own, or to all of a NUMA node, socket or core complex, near its GPU "
        "(default: none)",
    )
    option("--devices", choices=("all", "one"), default="all", help="GPUs that each rank sees (default: all)")
    option("--log-dir", type=Path, metavar="DIR", help="also write each rank's stdout and stderr to files in DIR")
    option(
        "--timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="grace period: after a signal or a failure, ranks that do not end within it are killed (default: 10)",
    )
    option("--profile", metavar="FIRST:LAST[:FOLDER]", help="write a profiler trace of these steps, for each rank")
    option("--dry-run", action="store_true", help="print what would be started, and start nothing")


def _add_script_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("the script").add_argument
    option("-m", "--module", action="store_true", help="run a module, like `python -m`")
    option("--shardwise", metavar="PLAN", help="run an unmodified Trainer or Accelerate script with this plan")
    option("--accelerate-config", type=Path, metavar="FILE", help="ranks and plan from a file of `accelerate config`")
    option("--as-deepspeed", action="store_true", help="`import deepspeed` imports shardwise (docs/deepspeed.md)")
    option("--autotuning", choices=("tune", "run"), help="of --as-deepspeed: find stage and micro-batch (and train)")
    option("--as-horovod", action="store_true", help="`import horovod` imports shardwise (docs/horovod.md)")
    option("--num_gpus", type=int, metavar="N", help="the same as --nproc")


def _add_elastic_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument_group("elastic jobs (docs/elastic.md)").add_argument
    option("--elastic", metavar="MIN:MAX", help="continue with MIN to MAX ranks when ranks are lost or join")
    option(
        "--retries",
        metavar="N[:SECONDS]",
        help="start at most N replacements of lost ranks within SECONDS (default: 3:600)",
    )
    option(
        "--launcher-timeout",
        type=float,
        metavar="S",
        help="on this machine: if the launcher and the process that takes over from it are killed, ranks end after S "
        "seconds (default: 60); on hosts: how long they look for another launcher (default: 0, they end with it)",
    )
    option(
        "--takeover",
        action="store_true",
        help="be the launcher of a job that has lost it; in the place of the script, give the folder that its ranks "
        "have named",
    )
    option(
        "--autoscale",
        metavar="POLICY",
        help="ask for more and fewer ranks by itself: fill, gain:0.7 (while a rank is that fast) or schedule:FILE",
    )
    launch_places.add_elastic_arguments(option)


def run(args: argparse.Namespace) -> int:
    """Run the job and return its exit status. Raises `ShardwiseError` for a job that cannot start."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the ranks' torch gives the same warnings
        try:
            return _run(args) if args.autotuning is None else _run_tuned(args)
        except KeyboardInterrupt:
            return 130  # before any rank was started; afterwards the launcher handles signals itself


def _run_tuned(args: argparse.Namespace) -> int:
    if not args.as_deepspeed:
        raise LaunchError("--autotuning is DeepSpeed's. Add --as-deepspeed; for other scripts: --shardwise auto.")
    if launch_places.place_of(args) != "local":
        raise LaunchError(NOT_ON_HOSTS)
    if args.elastic is not None:
        raise LaunchError("--autotuning looks at ranks that end by themselves. Remove --elastic.")
    return run_tuned(args, _run)


def _run(args: argparse.Namespace) -> int:
    if args.takeover:
        return launch.take_over(Path(args.command[0]), _STANDBY)
    _read_as_deepspeed(args)
    if args.profile is not None:
        steps = re.fullmatch(r"(\d+):(\d+)(:.+)?", args.profile)
        if steps is None or not 1 <= int(steps[1]) <= int(steps[2]):
            raise LaunchError(f"--profile {args.profile}: give the first and the last step, from 1, such as 10:12.")
        os.environ["SHARDWISE_PROFILE"] = args.profile
    if args.accelerate_config is not None:
        from shardwise.integrations.accelerate_config import read_accelerate_config

        take_config(args, read_accelerate_config(args.accelerate_config), str(args.accelerate_config))
    if args.shardwise is not None:
        if args.elastic is not None:
            raise LaunchError(
                "--elastic does not work with --shardwise, nor with an Accelerate config: the Trainer or Accelerator "
                "of the script makes a process group and divides the samples for one number of ranks. Use "
                "--max-restarts N instead of --elastic: then all ranks restart when one is lost, and the script goes "
                "on from its last checkpoint. A loop of your own that calls sw.shard goes on without lost ranks."
            )
        from shardwise.plan import load_plan
        from shardwise.plan.placement import preset

        plan = load_plan(args.shardwise)
        if plan.preset != "auto":
            preset(plan.preset)  # raises where the name is none, here rather than in every rank, or nowhere
    place = launch_places.place_of(args)
    job = _job(args, nproc=_nproc(args, 1, is_here=place == "local"))
    if args.machines is not None:
        if place != "local":
            raise LaunchError("num_machines is above 1, and hosts are named too. Remove one of them.")
        from shardwise.cli.one_machine import run_on_one

        return run_on_one(job, args.machines, args.dry_run)
    if place != "local":
        if args.launcher_timeout is not None and place not in _OUTLIVE_LAUNCHERS:
            raise LaunchError(
                f"--launcher-timeout is for ranks that outlive their launcher: on this machine, on hosts that are "
                f"reached by ssh, and in pods; not for --where {place}. Remove it."
            )
        if job.elastic is not None and place == "mpi":
            raise LaunchError(
                "--elastic does not work with --where mpi: an MPI job ends with its first dead rank. Remove --where "
                "mpi, and name the hosts with --hosts, --hostfile or --host-discovery-script."
            )
        return launch_places.run_elsewhere(place, args, job)
    if job.elastic is not None and job.elastic.autoscale is not None:
        raise LaunchError(
            "--autoscale needs hosts to grow to, and this machine alone has none. Name them with --hosts or "
            "--hostfile, or use --where slurm or k8s."
        )
    job.check()
    with launch.listen(job.port) as listener:  # both before torch is imported, so that a mistake is reported at once
        num_gpus = launch.count_gpus()
        if args.nproc is None:
            job = _job(args, nproc=_nproc(args, max(1, num_gpus), is_here=True))
        bound = job.bindings(launch.device_kind())
        if args.dry_run:
            print(describe(job, on_cpu=num_gpus == 0, bound=bound, seats=job.seats(launch.device_kind(), os.environ)))
            return 0
        if job.elastic is not None:
            return launch.supervise_elastic(job, listener, on_cpu=num_gpus == 0, bound=bound, standby=_STANDBY)
        return launch.supervise(job, listener, on_cpu=num_gpus == 0, bound=bound)


def _read_as_deepspeed(args: argparse.Namespace) -> None:
    """Accept the deepspeed launcher's name for `--nproc`."""
    if args.num_gpus is not None:
        if args.nproc not in (None, args.num_gpus):
            raise LaunchError(
                f"--num_gpus {args.num_gpus} and --nproc {args.nproc} are the same option with two values. Give one."
            )
        args.nproc = args.num_gpus


def take_config(args: argparse.Namespace, config: AccelerateConfig, where: str) -> None:
    """Apply a config of Accelerate to the options and to the ranks' environment. Options take precedence.

    Settings without an equivalent are printed.
    """
    if args.shardwise is not None:
        config.unsupported.append(f"the plan {json.dumps(config.plan)}: --shardwise {args.shardwise} overrides it")
        config.environment.pop("ACCELERATE_USE_DEEPSPEED", None)
    elif config.names_deepspeed_config:
        args.as_deepspeed = True
    for line in config.unsupported:
        print(f"shardwise: {where}: ignored: {line}", file=sys.stderr)
    if not config.names_deepspeed_config:
        args.shardwise = args.shardwise or json.dumps(config.plan)
    args.nproc = args.nproc or config.nproc
    args.machines = config.machines
    args.port = args.port or config.port
    os.environ.update(config.environment)


def _nproc(args: argparse.Namespace, default: int, *, is_here: bool) -> int:
    """The number of ranks that was asked for; otherwise `default`, within the bounds of an elastic job on this host."""
    if args.nproc is not None:
        return int(args.nproc)
    elastic = _elastic(args)
    return default if elastic is None or not is_here else max(elastic.least, min(default, elastic.most))


def _job(args: argparse.Namespace, nproc: int) -> Job:
    command = args.command[1:] if args.command[0] == "--" else args.command
    return Job(
        command=tuple(command),
        nproc=nproc,
        is_module=args.module,
        port=args.port,
        max_restarts=args.max_restarts,
        threads=args.threads,
        log_dir=args.log_dir,
        grace_seconds=args.timeout,
        run_by=_run_by(args),
        bind=args.bind,
        shows_one_device=args.devices == "one",
        elastic=_elastic(args),
    )


def _elastic(args: argparse.Namespace) -> Elastic | None:
    """The values of `--elastic` and `--retries`."""
    if args.elastic is None:
        if args.launcher_timeout is not None:
            raise LaunchError("--launcher-timeout is for elastic jobs. Add --elastic MIN:MAX.")
        if args.autoscale is not None:
            raise LaunchError("--autoscale is for elastic jobs. Add --elastic MIN:MAX, the limits of their size.")
        if args.retries is not None:
            raise LaunchError("--retries is for elastic jobs. Add --elastic MIN:MAX, or use --max-restarts instead.")
        return None
    limits = re.fullmatch(r"(\d+):(\d+)", args.elastic)
    if limits is None:
        raise LaunchError(f"--elastic {args.elastic}: give the minimum and the maximum number of ranks, such as 2:8.")
    retries = re.fullmatch(r"(\d+)(?::(\d+(?:\.\d+)?))?", "3:600" if args.retries is None else args.retries)
    if retries is None:
        raise LaunchError(f"--retries {args.retries}: give a number, or a number and seconds, such as 3:600.")
    is_on_hosts = launch_places.place_of(args) in _OUTLIVE_LAUNCHERS
    seconds = args.launcher_timeout
    if seconds is None:
        seconds = 0.0 if is_on_hosts else 60.0
    is_off = seconds == 0 and is_on_hosts
    if not (is_off or 1 <= seconds < 1e6):
        raise LaunchError(f"--launcher-timeout is {seconds:g}: give 1 second or more.")
    return Elastic(
        int(limits[1]),
        int(limits[2]),
        int(retries[1]),
        float(retries[2] or 600),
        launcher_timeout_seconds=seconds,
        autoscale=None if args.autoscale is None else parse_policy(args.autoscale),
        **launch_places.host_limits(args),
    )


def _run_by(args: argparse.Namespace) -> tuple[str, ...]:
    """The module that runs the script, if it does not run directly, and its arguments."""
    if args.as_deepspeed and args.shardwise is not None:
        raise LaunchError("--as-deepspeed takes its plan from the DeepSpeed config. Remove --shardwise.")
    if args.as_horovod and (args.as_deepspeed or args.shardwise is not None):
        raise LaunchError(
            "--as-horovod replicates the whole model, so there is no plan. Remove --shardwise and --as-deepspeed."
        )
    if args.as_horovod:
        return ("shardwise.integrations.horovod",)
    if args.as_deepspeed:
        return ("shardwise.integrations.deepspeed",)
    return () if args.shardwise is None else ("shardwise.integrations.run", "--plan", args.shardwise)
