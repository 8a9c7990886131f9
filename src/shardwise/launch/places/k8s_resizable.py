"""What a job on Kubernetes needs so that its launcher may change the number of its pods, and so that they are near each
other: rights, and hints for Kueue and the scheduler. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.errors import ConfigError
from shardwise.launch.places.k8s_scale import Target

Manifest = dict[str, Any]
ELASTIC_JOB = "kueue.x-k8s.io/elastic-job"
"""Kueue's annotation (KEP-77): the Job may change its size, and further pods wait for quota."""
_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
_SLICE_TOPOLOGY, _SLICE_SIZE = "kueue.x-k8s.io/podset-slice-required-topology", "kueue.x-k8s.io/podset-slice-size"
"""Kueue's annotations for its topology-aware scheduling (KEP-2724)."""
_LEVEL = re.compile(r"((?:[a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*)(?::(\d{1,5}))?")
_API = "rbac.authorization.k8s.io"


def rights(target: Target, metadata: Mapping[str, Any]) -> list[Manifest]:
    """A service account that may change `target`, and nothing else."""
    name = metadata["name"]
    group = "batch" if target.kind == "job" else "jobset.x-k8s.io"
    rule = {"apiGroups": [group], "resources": [f"{target.kind}s"], "resourceNames": [target.name]}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": metadata["namespace"]}
    role = {"apiGroup": _API, "kind": "Role", "name": name}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(metadata)},
        {
            "apiVersion": f"{_API}/v1",
            "kind": "Role",
            "metadata": dict(metadata),
            "rules": [{**rule, "verbs": ["patch"]}],
        },
        {
            "apiVersion": f"{_API}/v1",
            "kind": "RoleBinding",
            "metadata": dict(metadata),
            "roleRef": role,
            "subjects": [subject],
        },
    ]


def check_topology(topology: str, queue: str) -> None:
    """Raises `ConfigError`."""
    found = _LEVEL.fullmatch(topology)
    if topology and (found is None or found[2] == "0"):
        raise ConfigError(
            f"--topology {topology}: give a label of nodes, such as topology.kubernetes.io/rack; with :4, each 4 pods "
            f"must have the same value."
        )
    if found is not None and found[2] and not queue:
        raise ConfigError(
            f"--topology {topology}: only Kueue places groups of pods. Give a --queue, or leave out :{found[2]}."
        )


def pods_per_slice(topology: str) -> int:
    """Pods that must be in the same place; 1 if it is only a wish."""
    found = _LEVEL.fullmatch(topology)
    return int(found[2]) if found is not None and found[2] else 1


def add_topology(template: Manifest, topology: str, queue: str, labels: Mapping[str, str]) -> None:
    """To the pods with ranks, which have the `labels`: by Kueue if the job has a queue, else as a wish to the
    scheduler."""
    found = _LEVEL.fullmatch(topology)
    if found is None:
        return
    level, size = found.groups()
    if queue:
        near = {_TOPOLOGY: level} if size is None else {_SLICE_TOPOLOGY: level, _SLICE_SIZE: size}
        template["metadata"]["annotations"] = near
        return
    term = {"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": level}
    wish = {"weight": 100, "podAffinityTerm": term}
    template["spec"]["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}
