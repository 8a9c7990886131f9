"""`--autotuning tune` and `run` of `shardwise deepspeed` and `shardwise launch --as-deepspeed`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

NOT_ON_HOSTS = (
    "--autotuning is for ranks of one host. For several: shardwise plan --world N --hardware NAME, and its plan as "
    "--shardwise FILE."
)


def run_tuned(args: argparse.Namespace, run: Callable[[argparse.Namespace], int]) -> int:
    """Call `run(args)`, which starts the ranks of `args.command`, until the script's first forward; and with `run`
    again, with the config that was found. Returns the exit status; raises `ConfigError` if none was found.

    See `integrations/deepspeed/autotuning.py`.
    """
    from shardwise.integrations.deepspeed.autotuning import TunedJob  # needs torch, which takes a second to import

    job = TunedJob.of(args.command)
    for note in job.settings.notes:
        print(f"shardwise: {note}", file=sys.stderr)
    if not job.is_done:
        if not args.dry_run:
            job.begin()
        status = run(args)
        if status or args.dry_run:
            return status
    args.command = list(job.tuned_command())
    return run(args) if args.autotuning == "run" else 0
