"""Ranks on Kubernetes: the manifests of an Indexed Job with its headless Service, of a JobSet, of Kubeflow's TrainJob.

One pod is one host; in each, `torchrun` starts the ranks. A Job starts single pods again, which is of no use to ranks
that wait for each other; a JobSet starts all of them. Elastic jobs are different: `k8s_elastic.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import ConfigError
from shardwise.launch.autoscale import Sizes, describe_policy
from shardwise.launch.job import Job
from shardwise.launch.places.k8s_elastic import LAUNCHER, TOKEN_KEY, Part, elastic_parts
from shardwise.launch.places.k8s_resizable import ELASTIC_JOB, add_topology, check_topology, pods_per_slice, rights
from shardwise.launch.places.k8s_scale import Target
from shardwise.system.job_token import new_token

KINDS = ("job", "jobset", "trainjob")
_PORT = 29500
_INSTANCE = "app.kubernetes.io/instance"
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodRequest:
    """What to ask of a cluster."""

    image: str
    nodes: int = 1
    kind: str = "job"
    name: str = "shardwise"
    namespace: str = "default"
    gpus_per_node: int = 0
    queue: str = ""
    """Of Kueue; `""` is none."""
    secrets: tuple[str, ...] = ()
    """Secrets of the namespace whose entries become variables."""
    claims: Mapping[str, str] = field(default_factory=dict)
    """Persistent volume claims, and where each is mounted."""
    service_account: str = ""
    """Of the launcher, to change the number of pods with; `""` makes one that may do only that."""
    topology: str = ""
    """A label of nodes whose value the pods with ranks should share; with `:N`, each N consecutive pods must."""

    def check(self) -> None:
        """Raises `ConfigError`."""
        if not self.image:
            raise ConfigError("--where k8s needs --image: a container image with shardwise and the script.")
        if self.kind not in KINDS:
            raise ConfigError(f"--kind {self.kind!r} is none of {', '.join(KINDS)}.")
        if self.nodes < 1:
            raise ConfigError(f"--nodes is {self.nodes}: a job needs at least one.")
        for option, name in (("--name", self.name), ("--namespace", self.namespace)):
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{option} {name!r} is not a valid Kubernetes name: use lower-case letters, digits and dashes."
                )
        for claim, path in self.claims.items():
            if not path.startswith("/"):
                raise ConfigError(f"--claim {claim}:{path}: the path must begin with a slash.")
        check_topology(self.topology, self.queue)


@dataclass(frozen=True)
class K8sPlan:
    """Manifests, to be applied in order."""

    manifests: tuple[Manifest, ...]
    request: PodRequest
    note: str = ""
    """What a dry run says before them, as a comment."""

    def text(self) -> str:
        """What a dry run prints: YAML, as `kubectl apply -f -` reads it."""
        import yaml  # see [Note: late imports] in cli/launch.py

        comment = "".join(f"# {line}\n" for line in self.note.splitlines())
        return comment + yaml.safe_dump_all(self.manifests, sort_keys=False, width=1000).rstrip()

    @property
    def pods(self) -> str:
        """A selector for the pods of the job."""
        if self.is_elastic:
            return f"{_INSTANCE}={self.request.name}"
        label = "batch.kubernetes.io/job-name" if self.request.kind == "job" else "jobset.sigs.k8s.io/jobset-name"
        return f"{label}={self.request.name}"

    @property
    def decides(self) -> Manifest:
        """The object whose end is that of the whole: of an elastic job that of its launcher."""
        return self.manifests[-1]

    @property
    def is_elastic(self) -> bool:
        """Whether its pods come and go."""
        return any(manifest["kind"] == "Secret" for manifest in self.manifests)

    @property
    def delete_command(self) -> str:
        """What takes all of it away."""
        request, (first, *others) = self.request, self.manifests
        if not others:
            return f"kubectl delete {first['kind'].lower()}/{request.name} -n {request.namespace}"
        kinds = {manifest["kind"].lower(): None for manifest in reversed(self.manifests)}
        return f"kubectl delete {','.join(kinds)} -n {request.namespace} -l {_INSTANCE}={request.name}"


def plan_k8s(job: Job, request: PodRequest, environment: Mapping[str, str]) -> K8sPlan:
    """The manifests that run `job.nproc` ranks in each of `request.nodes` pods. Raises `ConfigError`.

    Values of `environment` are in the manifests, for all to read; secrets belong into `request.secrets`.
    """
    request.check()
    if request.topology and job.elastic is None:
        raise ConfigError("--topology is for elastic jobs. Add --elastic MIN:MAX, or remove it.")
    if request.service_account and (job.elastic is None or job.elastic.autoscale is None):
        raise ConfigError("--service-account is for --autoscale, which needs rights. Add that, or remove it.")
    if job.elastic is not None:
        return K8sPlan(tuple(_elastic(job, request, environment)), request, _note(job, request))
    if job.max_restarts and request.kind != "jobset":
        raise ConfigError(
            f"--max-restarts: a {request.kind} restarts only the pod that failed, which cannot rejoin the others. Use "
            f"--kind jobset, which restarts all pods."
        )
    if job.bind != "none":
        raise ConfigError(
            f"--bind {job.bind}: in pods without --elastic, torchrun starts the ranks. Remove it, or add --elastic "
            f"MIN:MAX."
        )
    build = {"job": _indexed_job, "jobset": _job_set, "trainjob": _train_job}[request.kind]
    return K8sPlan(tuple(build(job, request, environment)), request)


def _indexed_job(job: Job, request: PodRequest, environment: Mapping[str, str]) -> list[Manifest]:
    service = _service(request, {"batch.kubernetes.io/job-name": request.name})
    spec = _job_spec(job, request, environment, address=f"{request.name}-0.{request.name}")
    spec["template"]["spec"]["subdomain"] = request.name
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(request), "spec": spec}
    return [service, whole]


def _job_set(job: Job, request: PodRequest, environment: Mapping[str, str]) -> list[Manifest]:
    spec = _job_spec(job, request, environment, address=f"{request.name}-hosts-0-0.{request.name}")
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _metadata(request),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": request.name},
                "failurePolicy": {"maxRestarts": job.max_restarts},
                "replicatedJobs": [{"name": "hosts", "replicas": 1, "template": {"spec": spec}}],
            },
        }
    ]


def _elastic(job: Job, request: PodRequest, environment: Mapping[str, str]) -> list[Manifest]:
    """See [Note: pods that come and go]."""
    elastic, is_set, name = job.elastic, request.kind == "jobset", request.name
    assert elastic is not None
    if request.kind == "trainjob":
        raise ConfigError("--elastic: a TrainJob has only one kind of pod. Use --kind jobset, or --kind job.")
    num_slots = job.nproc * request.nodes
    if num_slots < elastic.least:
        raise ConfigError(
            f"--elastic {elastic.least}:{elastic.most}: {elastic.least} ranks are needed, but {request.nodes} pods of "
            f"{job.nproc} have {num_slots} slots. Raise --nodes or --nproc, or lower MIN."
        )
    names = {part: f"{name}-{part}" for part in (LAUNCHER, "hosts")}
    first = f"{names[LAUNCHER]}-0-0" if is_set else f"{names[LAUNCHER]}-0"
    target = Target(request.kind, name if is_set else names["hosts"])
    if elastic.autoscale is not None:
        _check_autoscale(job, request)
    parts = elastic_parts(
        job, request.nodes, _escaped(job.command), f"{first}.{name}", name, str(target), request.topology
    )
    specs = {which: _part(job, request, environment, part) for which, part in zip(names, parts, strict=True)}
    add_topology(specs["hosts"]["template"], request.topology, request.queue, {_INSTANCE: name})
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(request, with_queue=False)}
    secret["stringData"] = {TOKEN_KEY: new_token()}
    made = [secret]
    if elastic.autoscale is not None:
        account = {"serviceAccountName": request.service_account or name, "automountServiceAccountToken": True}
        specs[LAUNCHER]["template"]["spec"] |= account
        made += [] if request.service_account else rights(target, _metadata(request, with_queue=False))
    if is_set:
        jobs = [{"name": which, "replicas": 1, "template": {"spec": spec}} for which, spec in specs.items()]
        whole = {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [LAUNCHER]},
            "replicatedJobs": jobs,
        }
        api = "jobset.x-k8s.io/v1alpha2"
        return [*made, {"apiVersion": api, "kind": "JobSet", "metadata": _metadata(request), "spec": whole}]
    made.append(_service(request, {_INSTANCE: name}))
    for which in reversed(names):  # the launcher's last: it decides
        metadata = _metadata(request) | {"name": names[which]}
        if which == "hosts" and request.queue and elastic.autoscale is not None:
            metadata["annotations"] = {ELASTIC_JOB: "true"}
        specs[which]["template"]["spec"]["subdomain"] = name
        made.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": specs[which]})
    return made


def _note(job: Job, request: PodRequest) -> str:
    """What the launcher will do by itself."""
    elastic = job.elastic
    if elastic is None or elastic.autoscale is None:
        return ""
    sizes = _sizes(job, request)
    return describe_policy(
        elastic.autoscale, sizes, job.nproc * request.nodes, "the API server, as the queue admits pods"
    )


def _sizes(job: Job, request: PodRequest) -> Sizes:
    assert job.elastic is not None
    return Sizes.of(job.elastic.least, job.elastic.most, job.nproc * pods_per_slice(request.topology))


def _check_autoscale(job: Job, request: PodRequest) -> None:
    """Raises `ConfigError`."""
    if request.kind == "jobset" and request.queue:
        raise ConfigError(
            "--autoscale with --kind jobset and --queue: Kueue lets only Jobs change their size. Use --kind job."
        )
    sizes = _sizes(job, request)
    sizes.check()
    if sizes.nearest(num := job.nproc * request.nodes) != num:
        raise ConfigError(
            f"--autoscale: --nodes {request.nodes} of {job.nproc} ranks are {num}, but the job may have "
            f"{sizes.in_words()}. Give another --nodes."
        )


def _part(job: Job, request: PodRequest, environment: Mapping[str, str], part: Part) -> Manifest:
    spec = _job_spec(job, request, environment, address="")
    del spec["backoffLimit"]
    spec |= part.fields
    (container,) = spec["template"]["spec"]["containers"]
    own = part.container
    container |= {"name": own["name"], "command": own["command"], "env": [*own["env"], *container["env"]]}
    if own["name"] == LAUNCHER:
        container.pop("resources", None)
    spec["template"]["metadata"] = {"labels": {_INSTANCE: request.name}}
    return spec


def _service(request: PodRequest, selector: Mapping[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(request, with_queue=False),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before any pod counts as ready
            "selector": dict(selector),
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }


def _train_job(job: Job, request: PodRequest, environment: Mapping[str, str]) -> list[Manifest]:
    if request.claims or request.secrets:
        raise ConfigError("A TrainJob takes its volumes and secrets from its runtime. Remove --claim and --secret.")
    trainer: Manifest = {
        "image": request.image,
        "command": ["torchrun", *_script(job)],  # the runtime sets torchrun's options, as PET_...
        "numNodes": request.nodes,
        "numProcPerNode": job.nproc,
    }
    if environment or job.threads:
        trainer["env"] = _environment(job, environment)
    if request.gpus_per_node:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": str(request.gpus_per_node)}}
    spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    api = "trainer.kubeflow.org/v1alpha1"
    return [{"apiVersion": api, "kind": "TrainJob", "metadata": _metadata(request), "spec": spec}]


def _job_spec(job: Job, request: PodRequest, environment: Mapping[str, str], address: str) -> Manifest:
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]  # 64 MiB otherwise, and NCCL wants more
    for number, (claim, path) in enumerate(request.claims.items()):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    container: Manifest = {
        "name": "ranks",
        "image": request.image,
        "command": [
            "torchrun",
            f"--nnodes={request.nodes}",
            f"--nproc-per-node={job.nproc}",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            f"--master-addr={address}",
            f"--master-port={_PORT}",
            *_script(job),
        ],
        "env": _environment(job, environment),
        "ports": [{"name": "rendezvous", "containerPort": _PORT, "protocol": "TCP"}],
        "volumeMounts": mounts,
    }
    if request.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in request.secrets]
    if request.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(request.gpus_per_node)}}
    pod: Manifest = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": max(30, int(job.grace_seconds) + 20),
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "completionMode": "Indexed",
        "completions": request.nodes,
        "parallelism": request.nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }


def _script(job: Job) -> list[str]:
    """What torchrun is to run; Kubernetes would put variables where it sees `$(...)`."""
    over = ["-m", *job.run_by] if job.run_by else []
    return _escaped((*over, *(["-m"] if job.is_module else []), *job.command))


def _escaped(words: Iterable[str]) -> list[str]:
    return [word.replace("$(", "$$(") for word in words]


def _environment(job: Job, environment: Mapping[str, str]) -> list[dict[str, str]]:
    values = {"PYTHONUNBUFFERED": "1", **({"OMP_NUM_THREADS": str(job.threads)} if job.threads else {}), **environment}
    return [{"name": name, "value": value} for name, value in values.items()]


def _metadata(request: PodRequest, with_queue: bool = True) -> Manifest:
    labels = {"app.kubernetes.io/managed-by": "shardwise", _INSTANCE: request.name}
    if request.queue and with_queue:
        labels["kueue.x-k8s.io/queue-name"] = request.queue
    return {"name": request.name, "namespace": request.namespace, "labels": labels}
