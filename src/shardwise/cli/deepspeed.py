"""`shardwise deepspeed`: accepts a command line of DeepSpeed's launcher, with shardwise in place of DeepSpeed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from shardwise import launch
from shardwise.cli.autotuning import NOT_ON_HOSTS, run_tuned
from shardwise.cli.deepspeed_hosts import names_hosts, notes_on_hosts, run_on_hosts
from shardwise.errors import LaunchError
from shardwise.integrations.deepspeed.command_line import add_options, local_launch, refuse_options
from shardwise.launch.job import Job, describe

_RUN_BY = "shardwise.integrations.deepspeed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """DeepSpeed's own options, and our `--dry-run`."""
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the job and return its exit status. Raises `ShardwiseError` for a job that cannot start."""
    refuse_options(args)
    if not args.autotuning:
        return _run(args)
    if names_hosts(args):
        raise LaunchError(NOT_ON_HOSTS)
    return run_tuned(args, _run)


def _run(args: argparse.Namespace) -> int:
    if names_hosts(args):
        _tell(notes_on_hosts(args))
        return run_on_hosts(args, _job(args, max(1, args.num_gpus)))
    num_devices = launch.count_gpus()
    asked = local_launch(args, num_devices)
    _tell(asked.notes)
    if asked.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, asked.devices))
    job = _job(args, asked.nproc or max(1, num_devices))
    job.check()
    with launch.listen(job.port) as listener:
        bound = job.bindings(launch.device_kind())
        if args.dry_run:
            seats = job.seats(launch.device_kind(), os.environ)
            print(describe(job, on_cpu=num_devices == 0, bound=bound, seats=seats))
            return 0
        return launch.supervise(job, listener, on_cpu=num_devices == 0, bound=bound)


def _job(args: argparse.Namespace, nproc: int) -> Job:
    return Job(
        command=tuple(args.command),
        nproc=nproc,
        is_module=args.module,
        port=args.master_port,
        log_dir=None if args.enable_each_rank_log == "None" else Path(args.enable_each_rank_log),
        run_by=(_RUN_BY,) if args.no_local_rank else (_RUN_BY, "--local-rank"),
        bind="cores" if args.bind_cores_to_rank else "none",
    )


def _tell(notes: list[str]) -> None:
    for note in notes:
        print(f"shardwise: deepspeed option {note}", file=sys.stderr)
