"""An elastic job within an allocation of Slurm: a step for each node, at whose other end `launch/hosts/` starts ranks.

Each node has a step of its own, so that one that fails takes only its own ranks along. The allocation has to outlive
it (`--no-kill`). The nodes are those that the allocation has at the time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.launch.job import Job
from shardwise.launch.places.hosts import Host, Share, expand, shares
from shardwise.launch.places.ssh import MEMBERS, SshPlan, SshSettings

EVERY_SECONDS = 10.0
"""Between two looks at the nodes of an allocation: the controller answers everybody's questions."""
_ASK_SECONDS = 30


@dataclass(frozen=True)
class NodesPlan(SshPlan):
    """What would run on which node. Messages go by `srun` in the place of ssh."""

    job_of: Callable[[str], str] = lambda _: ""
    """The job that has a node, if it is not the launcher's."""

    def connection(self, share: Share) -> list[str]:
        """The command that opens the connection to a node."""
        # all that the allocation has of it, though other steps are there: their ranks are of the past
        alone = ["--nodes=1", "--ntasks=1", f"--nodelist={share.host.name}", "--overlap", "--mem=0", "--cpu-bind=none"]
        quiet = ["--unbuffered", "--kill-on-bad-exit=0", "--disable-status", f"--chdir={self.settings.directory}"]
        there = [self.job.python, "-m", "shardwise.launch.hosts", MEMBERS]
        job = self.job_of(share.host.name)
        alone += [f"--jobid={job}"] if job else []
        return ["srun", *alone, *quiet, *self.settings.options, *there]


def plan_nodes(job: Job, environment: Mapping[str, str], env: Mapping[str, str], settings: SshSettings) -> NodesPlan:
    """As many ranks as the job may have, `job.nproc` on each node of the allocation that `env` speaks of.

    Raises `ConfigError`.
    """
    if not env.get("SLURM_JOB_ID"):
        raise ConfigError(
            "--elastic with --where slurm works within an allocation. Submit a script with `#SBATCH --no-kill` that "
            "has this command, or start it under `salloc --no-kill`."
        )
    nodes = expand(env.get("SLURM_JOB_NODELIST", ""))
    if not nodes:
        raise ConfigError("SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not: is this within an allocation?")
    chosen = shares([Host(name) for name in nodes], job.nproc)
    return NodesPlan(job, tuple(chosen), settings, environment, slots_per_host=job.nproc)


def nodes_of(number: str) -> list[Host]:
    """The nodes that the allocation has now, as `squeue` says. Raises `ConfigError`."""
    command = ["squeue", "--noheader", f"--jobs={number}", "--format=%N"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"squeue did not list the nodes of job {number}: {error}.") from error
    names = expand(done.stdout.strip())
    if done.returncode or not names:
        raise ConfigError(f"squeue did not list the nodes of job {number}: {done.stderr.strip() or 'none'}.")
    return [Host(name) for name in names]
