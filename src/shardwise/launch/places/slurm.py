"""Ranks started by Slurm: a script for `sbatch`, or `srun` within an allocation. One task is one rank.

[Note: the end of the time] Slurm kills a job at its time limit. Some time before, it sends the batch script a signal
(`--signal=B:USR1@...`); the script passes SIGTERM on to the ranks, which save as they do after Ctrl-C (`StopRequest`),
waits for them, and puts the job into the queue again. It is the script that gets the signal, as only the script can
do the latter. A job that is preempted gets the same signal where the cluster has `PreemptParameters=send_user_signal`.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.job import Job
from shardwise.launch.places.hosts import Host, Share, expand
from shardwise.launch.places.mpi import run_and_pass_on

_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
_SUBMIT_SECONDS = 120.0
_CPU_BIND = {"cores": "cores", "node": "ldoms", "socket": "sockets"}
"""Slurm's names for values of `--bind`."""
_NO_CONTROLLER = r"configuration source|contact slurm controller|Unable to contact|Connection refused"


@dataclass(frozen=True)
class SlurmRequest:
    """What to ask of Slurm."""

    nodes: int = 1
    name: str = "shardwise"
    time: str = ""
    """As Slurm writes it (`30`, `2:00:00`, `1-12`); `""` is what the partition gives."""
    gpus_per_node: int = 0
    save_seconds: int = 120
    """How long before the time limit the ranks get SIGTERM, to save."""
    requeue: bool = True
    bind: str = "none"
    arguments: tuple[str, ...] = ()
    """More options, as sbatch and srun take them: `--partition=gpu`, `--account=me`."""

    def check(self) -> None:
        """Raises `ConfigError`."""
        if self.nodes < 1:
            raise ConfigError(f"--nodes is {self.nodes}: a job needs at least one.")
        if self.time and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time!r} is not a time limit: give minutes, H:MM:SS or D-HH:MM:SS.")
        if not 0 <= self.save_seconds <= 65535:
            raise ConfigError(f"--save-before-end is {self.save_seconds}: Slurm takes 0 to 65535 seconds.")
        if self.save_seconds >= seconds_of(self.time):
            raise ConfigError(f"--save-before-end {self.save_seconds} is not less than --time {self.time}.")
        if "\n" in self.name or not self.name:
            raise ConfigError(f"--name {self.name!r} is not a valid job name.")
        for argument in self.arguments:
            if "\n" in argument or not argument.startswith("-"):
                raise ConfigError(f"--launcher-args: {argument!r} is not an option of sbatch; write --partition=gpu.")


@dataclass(frozen=True)
class SbatchPlan:
    """A batch script, as `sbatch` reads it from its input."""

    script: str

    def text(self) -> str:
        """What a dry run prints: the script itself, to be kept and changed."""
        return self.script.rstrip()


@dataclass(frozen=True)
class SrunPlan:
    """A command within an allocation."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    shares: tuple[Share, ...]

    def text(self) -> str:
        """What a dry run prints."""
        return "\n".join([*(share.in_words() for share in self.shares), shlex.join(self.command)])


def plan_sbatch(
    job: Job, request: SlurmRequest, environment: Mapping[str, str], directory: str, log_dir: str = ""
) -> SbatchPlan:
    """A script that runs `job.nproc` ranks on each of `request.nodes` nodes. Raises `ConfigError`.

    `environment` goes with the job by `--export`, by names alone: values do not come into the script.
    """
    request.check()
    _check_no_restarts(job)
    place = f"{log_dir}/" if log_dir else ""
    header = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={job.nproc}",
        *([f"--cpus-per-task={job.threads}"] if job.threads else []),
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        *([f"--time={request.time}"] if request.time else []),
        f"--chdir={directory}",
        f"--output={place}%x-%j.log",
        "--open-mode=append",
        "--requeue" if request.requeue else "--no-requeue",
        *([f"--signal=B:USR1@{request.save_seconds}"] if request.save_seconds else []),
        *([f"--export=ALL,{','.join(environment)}"] if environment else []),
        *request.arguments,
    ]
    output = [f"--output={place}%x-%j-rank-%t.log", "--open-mode=append"] if log_dir else []
    step = shlex.join(["srun", *_step_options(job, request), *output, *job.script_command()])
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in header), "", _BODY.format(
        default_threads=_default_threads(job), step=step, then=_REQUEUE if request.requeue else _END
    )]  # fmt: skip
    return SbatchPlan("\n".join(lines))


def plan_srun(job: Job, request: SlurmRequest, environment: Mapping[str, str], env: Mapping[str, str]) -> SrunPlan:
    """The step of an allocation, whose variables are in `env`. Raises `ConfigError`."""
    request.check()
    _check_no_restarts(job)
    names = expand(env.get("SLURM_JOB_NODELIST", ""))
    if not names:
        raise ConfigError("SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: is this within an allocation?")
    shares = tuple(Share(Host(name), number * job.nproc, job.nproc) for number, name in enumerate(names))
    size = [f"--nodes={len(names)}", f"--ntasks={len(names) * job.nproc}", f"--ntasks-per-node={job.nproc}"]
    # srun ends a step when it gets SIGTERM, but passes SIGINT on, if it is not to print a status instead
    options = [*size, "--disable-status", *_step_options(job, request), *request.arguments]
    return SrunPlan(("srun", *options, *job.script_command()), environment, shares)


def run_sbatch(plan: SbatchPlan, environment: Mapping[str, str]) -> str:
    """Submit the script, and return what `sbatch` says: the number of the job. Raises `LaunchError`."""
    check_there("sbatch")
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=plan.script,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SUBMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"sbatch did not answer within {_SUBMIT_SECONDS:g} s. See with `scontrol ping` if the controller is up."
        ) from error
    if done.returncode:
        raise LaunchError(_refusal(done.stderr))
    return done.stdout.strip().partition(";")[0]


def _refusal(stderr: str) -> str:
    """What `sbatch` says, in one sentence."""
    lines = [re.sub(r"^sbatch: ((error|fatal): )?", "", line.strip()).rstrip(".") for line in stderr.splitlines()]
    why = "; ".join(filter(None, lines)) or "it gave no reason"
    if re.search(_NO_CONTROLLER, why):
        return (
            f"The Slurm controller cannot be reached from here ({why}). Run this on a login node, or check SLURM_CONF "
            f"and `scontrol ping`."
        )
    return f"Slurm refused the job: {why}."


def run_srun(plan: SrunPlan) -> int:
    """Run the step to its end, and return its exit status, the highest of all tasks.

    The first signal reaches ranks as SIGINT, the second one ends the step.
    """
    check_there("srun")
    return run_and_pass_on(plan.command, os.environ | plan.environment, (signal.SIGINT, signal.SIGTERM))


def check_there(command: str) -> None:
    """Raises `LaunchError` if Slurm's command is not here."""
    if shutil.which(command) is None:
        raise LaunchError(
            f"This machine has no {command}. Run this on a login node of a Slurm cluster, or use --dry-run here."
        )


def seconds_of(time: str) -> float:
    """Seconds of a time as Slurm writes it; infinite for none."""
    if not time:
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, *[*parts, 0][:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


def _step_options(job: Job, request: SlurmRequest) -> list[str]:
    if request.bind not in ("none", *_CPU_BIND):
        raise ConfigError(f"--bind {request.bind}: srun has no such binding. Give one of {', '.join(_CPU_BIND)}.")
    bind = [f"--cpu-bind={_CPU_BIND[request.bind]}"] if request.bind in _CPU_BIND else []  # else as the cluster has it
    return ["--kill-on-bad-exit=1", *bind, *([f"--cpus-per-task={job.threads}"] if job.threads else [])]


def _default_threads(job: Job) -> str:
    return str(job.threads) if job.threads else "${SLURM_CPUS_PER_TASK:-1}"


def _check_no_restarts(job: Job) -> None:
    if job.max_restarts:
        raise ConfigError("--max-restarts: Slurm requeues whole jobs, not ranks. Remove it; see --no-requeue.")


def _quoted(option: str) -> str:
    key, equals, value = option.partition("=")
    return f"{key}={shlex.quote(value)}" if equals else option


_BODY: Final = """\
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${{OMP_NUM_THREADS:-{default_threads}}}"

# Shortly before the time limit: the ranks save and end.
save() {{
  trap "" USR1 TERM  # requeuing sends SIGTERM too
  echo "shardwise: SIGTERM is sent to the ranks, so that they can save."
  scancel --signal=TERM "$SLURM_JOB_ID"  # its steps; srun itself would kill them
  wait "$step"
  {then}
}}
trap save USR1 TERM

{step} &
step=$!
wait "$step"
"""
_REQUEUE: Final = 'echo "shardwise: the job is requeued."\n  scontrol requeue "$SLURM_JOB_ID"\n  exit 0'
_END: Final = "exit 143"
