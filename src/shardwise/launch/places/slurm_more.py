"""More nodes for an elastic job in a Slurm allocation: further jobs of one node each, submitted as they are wanted.

[Note: jobs of one node] Slurm can make an allocation larger only where its administrator permits it
(`permit_job_expansion`), and smaller only from its end. A job of one node needs no right, is admitted by itself, and is
cancelled when its ranks have left. What it runs waits for the end of the first job, so that it does not outlive it.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.launch.places.hosts import Host
from shardwise.launch.places.slurm_hosts import nodes_of

_ASK_SECONDS = 60
_SUFFIX = "-more"
_WAITS = """\
missed=0
while [ $missed -lt 5 ]; do
  sleep 10
  if [ -n "$(squeue --noheader --states=RUNNING --jobs={job} --format=%i 2>/dev/null)" ]; then missed=0
  else missed=$((missed + 1)); fi
done"""


@dataclass(frozen=True)
class Allocation:
    """The job that the launcher is in, and how nodes like its own are requested."""

    job: str
    options: tuple[str, ...] = ()

    @classmethod
    def of(cls, env: Mapping[str, str], gpus_per_node: int = 0) -> Allocation:
        """As `env` tells, which Slurm has set."""
        given = {
            "partition": env.get("SLURM_JOB_PARTITION", ""),
            "account": env.get("SLURM_JOB_ACCOUNT", ""),
            "qos": env.get("SLURM_JOB_QOS", ""),
            "cpus-per-task": env.get("SLURM_CPUS_ON_NODE", ""),
            "mem": env.get("SLURM_MEM_PER_NODE", ""),
            "gpus-per-node": str(gpus_per_node or env.get("SLURM_GPUS_PER_NODE", "")),
            "job-name": env.get("SLURM_JOB_NAME", "shardwise") + _SUFFIX,
        }
        return cls(env["SLURM_JOB_ID"], tuple(f"--{name}={value}" for name, value in given.items() if value))

    def submission(self, nodes: Collection[str]) -> list[str]:
        """The command that asks for one node more than `nodes`; it prints the number of the job."""
        own = ["--nodes=1", "--ntasks-per-node=1", "--no-requeue", "--output=/dev/null", *self.options]
        own += [f"--exclude={','.join(nodes)}"] if nodes else []
        return ["sbatch", "--parsable", *own, "--wrap", _WAITS.format(job=self.job)]


def run_slurm(command: Sequence[str]) -> str:
    """What a command of Slurm prints. Raises `ConfigError`."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command[0]} cannot be asked: {error}.") from error
    if done.returncode:
        why = "; ".join(line.strip().rstrip(".") for line in done.stderr.splitlines()) or "it gave no reason"
        raise ConfigError(f"{command[0]} has refused: {why}.")
    return done.stdout


class MoreNodes:
    """The nodes of an allocation and of further jobs, as the `ListedPlace` of a job with `--autoscale`."""

    room = None

    def __init__(
        self,
        allocation: Allocation,
        slots_per_node: int,
        num_slots: int,
        run: Callable[[Sequence[str]], str] = run_slurm,
        own_nodes: Callable[[str], list[Host]] = nodes_of,
    ) -> None:
        self.unit = slots_per_node
        self.lost: Callable[[], Collection[str]] = tuple
        self._allocation, self._run, self._own_nodes = allocation, run, own_nodes
        self._num_nodes = num_slots // slots_per_node
        self._jobs: dict[str, str] = {}
        """Further jobs, in the order of their submission, with their node; `""` while they wait."""
        self._working = threading.Lock()
        """Held by what changes jobs, while Slurm answers: the launcher's main loop never takes it."""

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        """See `Place`. Raises `ConfigError`."""
        del hosts
        with self._working:
            self._num_nodes = num_slots // self.unit
            self._look()
            own = [node.name for node in self._own_nodes(self._allocation.job)]
            num_more = max(0, self._num_nodes - len(own))
            for _ in range(num_more - len(self._jobs)):
                self._submit(own)
            waiting = [job for job, node in self._jobs.items() if not node]
            self._cancel(*waiting[::-1][: max(0, len(self._jobs) - num_more)])

    def read(self) -> list[Host]:
        """See `ListedPlace`. Raises `ConfigError`."""
        own = self._own_nodes(self._allocation.job)
        with self._working:
            self._look()
            self._replace_doubles([node.name for node in own])
            nodes = [*own, *(Host(node) for node in self._jobs.values() if node)]
            lost = set(self.lost())
            nodes = [*(one for one in nodes if one.name not in lost), *(one for one in nodes if one.name in lost)]
            return nodes[: max(1, self._num_nodes)]

    def job_of(self, node: str) -> str:
        """The job that has a node, if it is a further one; otherwise `""`."""
        return next((job for job, its_node in list(self._jobs.items()) if its_node == node), "")

    def release(self, host: str) -> None:
        """Give a node back that was to leave."""
        if job := self.job_of(host):
            threading.Thread(target=self._give_back, args=(job,), daemon=True).start()

    def close(self) -> None:
        self._give_back(*self._jobs)

    def _submit(self, own: Sequence[str]) -> None:
        nodes = [*own, *filter(None, self._jobs.values())]
        number = self._run(self._allocation.submission(nodes)).strip().partition(";")[0]
        if not number:
            raise ConfigError("sbatch told no number of the job that it has submitted.")
        self._jobs[number] = ""

    def _replace_doubles(self, own: Sequence[str]) -> None:
        """Where jobs share nodes, two that waited at the same time may have got the same one."""
        known = set(own)
        for job, node in list(self._jobs.items()):
            if node in known:
                self._cancel(job)
                self._submit(own)
            known |= {node} - {""}

    def _give_back(self, *jobs: str) -> None:
        with self._working:
            self._cancel(*jobs)

    def _cancel(self, *jobs: str) -> None:
        for job in jobs:
            self._jobs.pop(job, None)
        if jobs:
            with contextlib.suppress(ConfigError):  # they end by themselves: see [Note: jobs of one node]
                self._run(["scancel", *jobs])

    def _look(self) -> None:
        """Which jobs have a node by now, and which have ended."""
        if not self._jobs:
            return
        try:
            told = self._run(["squeue", "--noheader", f"--jobs={','.join(self._jobs)}", "--format=%i %T %N"])
        except ConfigError as error:
            if "Invalid job id" not in str(error):
                raise
            told = ""  # the only one has ended, a while ago
        found = {words[0]: words[1:] for line in told.splitlines() if (words := line.split())}
        for job in list(self._jobs):
            if job not in found:
                del self._jobs[job]
            elif found[job][0] == "RUNNING":
                self._jobs[job] = found[job][-1]
