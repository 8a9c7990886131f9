"""The place of a job with `--autoscale` on Kubernetes: the launcher, in its pod, sets how many pods have ranks.

It changes `parallelism` and `completions` of its Indexed Job together, which that allows while it runs (KEP-3715,
stable in 1.31), or those of its part of a JobSet, where the cluster has JobSet's gate `ElasticJobsets` (KEP-463). With
Kueue the additional pods wait until their quota is admitted (KEP-77).

Only Python's own HTTP client is used: the image of a job need not have another one.
"""

from __future__ import annotations

import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, LaunchError

RANKS = "hosts"
"""The part of a JobSet whose pods have ranks."""
ACCOUNT = "SHARDWISE_SERVICE_ACCOUNT"
"""Where the token of the pod's service account is, if it is not projected to the usual place."""
_ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
_ANSWER_SECONDS = 20
_INDEX = re.compile(r"-(\d+)-[a-z0-9]+$")
_KINDS = {"job": "apis/batch/v1", "jobset": "apis/jobset.x-k8s.io/v1alpha2"}
_ADVICE = {
    401: "Its token is not accepted.",
    403: "Its service account may not change it: give it the Role that `--dry-run` prints, or name an account that may "
    "with --service-account.",
    404: "It was deleted.",
    422: "Of a JobSet, that needs a cluster with JobSet's gate ElasticJobsets: use --kind job.",
}


@dataclass(frozen=True)
class ApiServer:
    """The API server as a pod finds it. The token is read anew for each request, because it is renewed."""

    url: str
    account: Path
    namespace: str

    @classmethod
    def of_pod(cls, env: Mapping[str, str]) -> ApiServer:
        """Raises `ConfigError` if this is no pod, or one without a service account."""
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "--resize is for a launcher in a pod, and this is none: KUBERNETES_SERVICE_HOST is not set. Remove it."
            )
        account = Path(env.get(ACCOUNT) or _ACCOUNT_FOLDER)
        try:
            namespace = (account / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"--autoscale: the pod has no token to change its Job with: {account}: {error.strerror}. Give the pod "
                f"a service account, and automountServiceAccountToken: true."
            ) from error
        name = f"[{host}]" if ":" in host else host
        return cls(f"https://{name}:{port}", account, namespace)

    def patch(self, path: str, change: object, kind: str) -> None:
        """Raises `LaunchError`."""
        body = json.dumps(change).encode()
        try:
            token = (self.account / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": "application/json"}
            request = urllib.request.Request(f"{self.url}/{path}", body, headers, method="PATCH")
            trusted = urllib.request.HTTPSHandler(
                context=ssl.create_default_context(cafile=str(self.account / "ca.crt"))
            )
            # a proxy that the image names is for what is outside of the cluster
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), trusted)
            with opener.open(request, timeout=_ANSWER_SECONDS) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            advice = _ADVICE.get(error.code, "")
            raise LaunchError(f"the API server refuses it: {_reason(error)} {advice}".rstrip()) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            raise LaunchError(f"the API server does not answer at {self.url}: {why}.") from error


class ScaledPods:
    """The `Place` of a job whose pods a Job or a JobSet makes."""

    room = None

    def __init__(self, server: ApiServer, target: Target, slots_per_pod: int) -> None:
        self._server, self._target, self._slots_per_pod = server, target, slots_per_pod

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        """See `Place`. Raises `LaunchError`."""
        num_pods = completions_for(-(-num_slots // self._slots_per_pod), hosts)
        self._server.patch(*self._target.change(self._server.namespace, num_pods))


@dataclass(frozen=True)
class Target:
    """The Job or JobSet with the pods."""

    kind: str
    name: str
    part: int = 1
    """Of a JobSet: the place of the pods with ranks in `replicatedJobs`."""

    @classmethod
    def of(cls, text: str) -> Target:
        """`job/NAME` or `jobset/NAME`. Raises `ConfigError`."""
        kind, slash, name = text.partition("/")
        if kind not in _KINDS or not slash or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name):
            raise ConfigError(f"--resize {text}: name what makes the pods: job/NAME, or jobset/NAME.")
        return cls(kind, name)

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    def change(self, namespace: str, num_pods: int) -> tuple[str, object, str]:
        """The path, the body and the content type of the request that sets their number."""
        path = f"{_KINDS[self.kind]}/namespaces/{namespace}/{self.kind}s/{self.name}"
        if self.kind == "job":
            many: dict[str, Any] = {"parallelism": num_pods, "completions": num_pods}
            return path, {"spec": many}, "application/merge-patch+json"
        at = f"/spec/replicatedJobs/{self.part}"
        fields = f"{at}/template/spec"
        steps = [
            {"op": "test", "path": f"{at}/name", "value": RANKS},
            {"op": "replace", "path": f"{fields}/parallelism", "value": num_pods},
            {"op": "replace", "path": f"{fields}/completions", "value": num_pods},
        ]
        return path, steps, "application/json-patch+json"


def completions_for(num_pods: int, pods: Collection[str]) -> int:
    """What `completions` has to be so that `num_pods` remain of `pods`, or all of them if they are fewer.

    A Job ends the pods whose index is not below that number. Where pods with lower indexes have not come, or were
    evicted, the same number would end more pods than are to leave.
    """
    indexes = sorted(index for pod in pods if (index := index_of(pod)) is not None)
    kept = indexes[:num_pods]
    return max([num_pods, *(index + 1 for index in kept)])


def index_of(pod: str) -> int | None:
    """The completion index in the name of a pod, which its Job has given it."""
    found = _INDEX.search(pod)
    return int(found[1]) if found else None


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return f"{str(json.loads(error.read())['message']).rstrip('.')}."
    except (ValueError, KeyError, TypeError, OSError):
        return f"{error.reason} ({error.code})."
