"""An elastic job on Kubernetes: a Job for the launcher's pod and one for pods with ranks, or a JobSet of both.

[Note: pods that come and go] Pods call the launcher by the name that its Service gives it, so nobody asks the API who
is there, and pods need no rights. A pod that dies is replaced by its Job; how many there are can be changed while the
job runs (`parallelism` and `completions`). Evictions do not count as failures. The launcher's pod has no rank and asks
for no GPU. When it is lost, its Job makes another one, to which the pods that are there call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.launch.hosts.pod import CONNECT, JOB_FAILED, NAME
from shardwise.launch.job import Job
from shardwise.launch.places.pods import PORT
from shardwise.system.job_token import VARIABLE

Manifest = dict[str, Any]
LAUNCHER = "launcher"
TOKEN_KEY = "token"
_RETRIES = 100
"""So often each pod is replaced, not counting evictions; Kubernetes waits longer and longer before."""
_ENDED_BY_SIGNALS = [137, 143]
_EVICTED = {
    "action": "Ignore",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
}


@dataclass(frozen=True)
class Part:
    """What is peculiar to one of the Jobs."""

    container: Manifest
    fields: Manifest
    """Of the Job's `spec`."""


def options_of(job: Job, nodes: int, target: str, topology: str = "") -> list[str]:
    """The command line of the launcher in its pod, but for the script. `target` is what makes the pods with ranks.
    Raises `ConfigError`."""
    elastic = job.elastic
    assert elastic is not None
    if job.port == 65535:
        raise ConfigError("--port is 65535: the store uses the next port, so give 65534 or less.")
    where = ["--where", "pods", "--nodes", str(nodes), "--nproc", str(job.nproc), "--master-addr", "$(POD_IP)"]
    limits = ["--elastic", f"{elastic.least}:{elastic.most}", "--port", str(job.port or PORT)]
    times = ["--retries", f"{elastic.retries}:{elastic.retry_seconds:g}", "--timeout", f"{job.grace_seconds:g}"]
    hosts = ["--host-timeout", f"{elastic.host_timeout_seconds:g}", "--cooldown", f"{elastic.exclude_seconds:g}"]
    seconds = elastic.launcher_timeout_seconds
    hosts += ["--launcher-timeout", f"{seconds:g}"] if seconds else []
    more = ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    more += ["--threads", str(job.threads)] if job.threads else []
    more += ["--log-dir", str(job.log_dir)] if job.log_dir else []
    more += ["--bind", job.bind] if job.bind != "none" else []
    more += ["--devices", "one"] if job.shows_one_device else []
    near = ["--topology", topology] if topology and elastic.autoscale is not None else []
    more += ["--autoscale", str(elastic.autoscale), "--resize", target, *near] if elastic.autoscale is not None else []
    return [*where, *limits, *times, *hosts, *more, *_run_by(job), *(["-m"] if job.is_module else [])]


def launcher_container(job: Job, nodes: int, script: list[str], target: str, topology: str) -> Manifest:
    """What is peculiar to that of the launcher's pod; `script` is as Kubernetes takes it."""
    address = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    return {
        "name": LAUNCHER,
        "command": ["python", "-m", "shardwise", "launch", *options_of(job, nodes, target, topology), *script],
        "env": [address],
    }


def ranks_container(address: str, port: int) -> Manifest:
    """What is peculiar to that of a pod with ranks, which calls the launcher at `address`."""
    name = {"name": NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    return {
        "name": "ranks",
        "command": ["python", "-m", "shardwise.launch.hosts", CONNECT, f"{address}:{port}"],
        "env": [name],
    }


def elastic_parts(
    job: Job, nodes: int, script: list[str], address: str, secret: str, target: str, topology: str
) -> tuple[Part, Part]:
    """The launcher's and that of pods with ranks. `script` is as Kubernetes takes it, `target` is `job/NAME`."""
    parts = (
        Part(launcher_container(job, nodes, script, target, topology), launcher_job_fields()),
        Part(ranks_container(address, job.port or PORT), ranks_job_fields(nodes)),
    )
    for part in parts:
        part.container["env"].append(token_from(secret))
    return parts


def token_from(secret: str) -> Manifest:
    """The variable by which pods and launcher know each other."""
    return {"name": VARIABLE, "valueFrom": {"secretKeyRef": {"name": secret, "key": TOKEN_KEY}}}


def launcher_job_fields() -> Manifest:
    """A launcher that was killed is replaced; one whose job has failed is not."""
    failed = {"operator": "NotIn", "values": [0, *_ENDED_BY_SIGNALS]}
    rules = [_EVICTED, {"action": "FailJob", "onExitCodes": {"containerName": LAUNCHER, **failed}}]
    return {"completions": 1, "parallelism": 1, "backoffLimit": 6, "podFailurePolicy": {"rules": rules}}


def ranks_job_fields(nodes: int) -> Manifest:
    """A pod that dies is replaced, until the job has failed."""
    failed = {"operator": "In", "values": [JOB_FAILED]}
    rules = [_EVICTED, {"action": "FailJob", "onExitCodes": {"containerName": "ranks", **failed}}]
    many = {"completions": nodes, "parallelism": nodes, "backoffLimitPerIndex": _RETRIES}
    return many | {"podFailurePolicy": {"rules": rules}}


def _run_by(job: Job) -> list[str]:
    """The options for which `job.run_by` is there."""
    match job.run_by:
        case ():
            return []
        case ("shardwise.integrations.run", "--plan", plan):
            return ["--shardwise", plan]
        case ("shardwise.integrations.deepspeed",):
            return ["--as-deepspeed"]
        case ("shardwise.integrations.horovod",):
            return ["--as-horovod"]
    raise ConfigError(f"{' '.join(job.run_by)} cannot run an elastic job's script on Kubernetes.")
