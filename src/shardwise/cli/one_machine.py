"""Starts this host's ranks of a job whose command is run on every host, by torchrun.

`accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip A` works this way. No host reaches another one
before the rendezvous, so torchrun, which Accelerate uses too, has all that is needed.
"""

from __future__ import annotations

import os
import shlex
import sys

from shardwise.errors import ConfigError
from shardwise.integrations.accelerate_config import Machines
from shardwise.launch.environment import MALLOC_SETTINGS, default_threads
from shardwise.launch.hosts.facts import interface_of, kind_by_files
from shardwise.launch.job import Job
from shardwise.system.listening import address_towards


def run_on_one(job: Job, machines: Machines, dry_run: bool) -> int:
    """Replace this process by torchrun with this host's ranks of `job`; in a dry run print the command, and return 0.

    Raises `ConfigError` for options that torchrun does not have.
    """
    job.check()
    if job.elastic is not None or job.shows_one_device or job.bind != "none":
        raise ConfigError(
            "--elastic, --devices one and --bind are not supported with num_machines above 1. Name the hosts to "
            "one command instead: shardwise launch --hosts a:2,b:2 --shardwise PLAN script."
        )
    command = torchrun_command(job, machines)
    variables = _variables(job, machines)
    if dry_run:
        print(shlex.join(command))
        print("\n".join(f"  {name}={value}" for name, value in sorted(variables.items())))
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    return os.execve(command[0], command, os.environ | variables)


def torchrun_command(job: Job, machines: Machines) -> list[str]:
    """The command line of torchrun on this host; `job` is what each host runs."""
    words = [job.python, "-m", "torch.distributed.run", "--nnodes", str(machines.number)]
    words += ["--nproc-per-node", str(job.nproc), "--rdzv-backend", machines.backend]
    if machines.backend == "static":
        words += ["--node-rank", str(machines.rank), "--master-addr", machines.address]
        words += ["--master-port", str(machines.port)]
    else:
        words += ["--rdzv-endpoint", f"{machines.address}:{machines.port}", "--rdzv-id", f"shardwise-{machines.port}"]
    words += ["--max-restarts", str(job.max_restarts)]
    if job.log_dir is not None:
        words += ["--log-dir", str(job.log_dir), "--tee", "3"]
    return [*words, *job.script_command()[1:]]


def _variables(job: Job, machines: Machines) -> dict[str, str]:
    """The variables that `shardwise launch` sets too, unless they are set already."""
    wanted = {"OMP_NUM_THREADS": str(default_threads(job.nproc)), "PYTHONUNBUFFERED": "1"}
    if kind_by_files() is None:
        wanted |= MALLOC_SETTINGS
    interface = interface_of(address_towards(machines.address))
    if interface:  # gloo's default is the interface of the host's name, which others may not reach
        wanted["GLOO_SOCKET_IFNAME"] = interface
    unset = {name: value for name, value in wanted.items() if name not in os.environ}
    return unset if job.threads is None else unset | {"OMP_NUM_THREADS": str(job.threads)}
