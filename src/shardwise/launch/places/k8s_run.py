"""Carries out what `k8s.py` plans: makes the objects through the `kubernetes` client, and shows what the pods print."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.places.k8s import K8sPlan, Manifest

_LOOK_SECONDS = 1.0
_PLURALS = {"JobSet": "jobsets", "TrainJob": "trainjobs"}
_WELL = {"Complete", "Completed", "SuccessCriteriaMet"}


def run_k8s(plan: K8sPlan, look_seconds: float = _LOOK_SECONDS) -> int:
    """Submit, follow the logs until the job is over, and return 0 if it ended well, else 1.

    After Ctrl-C the job goes on; the status is 130. Raises `LaunchError` for what the cluster refuses.
    """
    client, config, unanswered = _client()
    try:
        named = os.environ.get("KUBECONFIG")
        config.load_config(**({"config_file": named} if named else {}))
    except config.ConfigException as error:
        raise LaunchError(
            f"No cluster is known here: {str(error).rstrip('.')}. Log in to one, so that kubectl finds it."
        ) from error
    api = client.ApiClient()
    job = _Submitted(plan, client, api, unanswered)
    job.submit()
    request = plan.request
    name = f"{request.kind}/{request.name} -n {request.namespace}"
    print(
        f"shardwise: submitted; `kubectl describe {name}` shows it, `kubectl delete {name}` ends it.", file=sys.stderr
    )
    try:
        return job.follow(look_seconds)
    except KeyboardInterrupt:
        print("shardwise: the job goes on.", file=sys.stderr)
        return 130


class _Submitted:
    """The objects of one plan in the cluster."""

    def __init__(self, plan: K8sPlan, client: Any, api: Any, unanswered: type[Exception]) -> None:
        self._plan, self._client, self._unanswered = plan, client, unanswered
        self._core, self._batch = client.CoreV1Api(api), client.BatchV1Api(api)
        self._custom = client.CustomObjectsApi(api)
        self._followed: dict[str, threading.Thread] = {}

    def submit(self) -> None:
        """Make all objects; if one is refused, those made before are taken away."""
        made: list[Manifest] = []
        for manifest in self._plan.manifests:
            try:
                self._make(manifest)
            except self._client.ApiException as error:
                for other in made:
                    self._core.delete_namespaced_service(other["metadata"]["name"], self._plan.request.namespace)
                raise LaunchError(f"The cluster refuses the {manifest['kind']}: {_reason(error)}") from error
            except self._unanswered as error:
                raise LaunchError(f"The cluster does not answer: {str(error).rstrip('.')}.") from error
            made.append(manifest)

    def follow(self, look_seconds: float) -> int:
        """Until the job is over; a pod's log is read by a thread, from when it has one."""
        while True:
            self._follow_new_pods()
            is_over, is_well = self._state()
            if is_over:
                self._follow_new_pods()
                for thread in self._followed.values():
                    thread.join(30)
                return 0 if is_well else 1
            time.sleep(look_seconds)

    def _make(self, manifest: Manifest) -> None:
        namespace = self._plan.request.namespace
        if manifest["kind"] == "Service":
            self._core.create_namespaced_service(namespace, manifest)
        elif manifest["kind"] == "Job":
            self._batch.create_namespaced_job(namespace, manifest)
        else:
            group, _, version = manifest["apiVersion"].partition("/")
            plural = _PLURALS[manifest["kind"]]
            self._custom.create_namespaced_custom_object(group, version, namespace, plural, manifest)

    def _state(self) -> tuple[bool, bool]:
        """Whether the job is over, and whether it ended well."""
        manifest, namespace = self._plan.manifests[-1], self._plan.request.namespace
        group, _, version = manifest["apiVersion"].partition("/")
        plural = _PLURALS.get(manifest["kind"], "jobs")
        found = self._custom.get_namespaced_custom_object(group, version, namespace, plural, self._plan.request.name)
        for condition in found.get("status", {}).get("conditions", ()):
            if condition["status"] == "True" and condition["type"] in {*_WELL, "Failed"}:
                return True, condition["type"] in _WELL
        return False, False

    def _follow_new_pods(self) -> None:
        namespace = self._plan.request.namespace
        for pod in self._core.list_namespaced_pod(namespace, label_selector=self._plan.pods).items:
            name = pod.metadata.name
            if name not in self._followed and pod.status.phase in ("Running", "Succeeded", "Failed"):
                thread = threading.Thread(target=self._show, args=(name, namespace), daemon=True)
                self._followed[name] = thread
                thread.start()

    def _show(self, pod: str, namespace: str) -> None:
        stream = self._core.read_namespaced_pod_log(pod, namespace, follow=True, _preload_content=False)
        for line in stream:
            sys.stdout.write(f"{pod}: {line.decode(errors='backslashreplace').rstrip()}\n")
            sys.stdout.flush()


def _client() -> tuple[Any, Any, type[Exception]]:
    """The library's two parts, and what it raises where nobody answers."""
    try:
        from kubernetes import client, config
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise LaunchError(
            "Submitting to Kubernetes needs its client: pip install 'shardwise[k8s]'. Or give the output of "
            "--dry-run to `kubectl apply -f -`."
        ) from error
    return client, config, HTTPError


def _reason(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.reason} ({error.status})"
