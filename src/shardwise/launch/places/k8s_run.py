"""Carries out what `k8s.py` plans: makes the objects through the `kubernetes` client, and shows what the pods print."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwise.errors import LaunchError
from shardwise.launch.job_report import say
from shardwise.launch.places.k8s import K8sPlan, Manifest

_WATCH_SECONDS = 300
"""A watch ends after so long and begins anew: a connection that died is not always noticed."""
_PAUSE_SECONDS = 1.0
_LAST_LINES_SECONDS = 30
_PLURALS = {"JobSet": "jobsets", "TrainJob": "trainjobs", "Job": "jobs"}
_OF_THE_CLIENT = {
    "Service": "service",
    "Secret": "secret",
    "ServiceAccount": "service_account",
    "Role": "role",
    "RoleBinding": "role_binding",
    "Job": "job",
}
"""Kinds that the Kubernetes client has methods for, and how it calls them there."""
_WELL = {"Complete", "Completed", "SuccessCriteriaMet"}
_GONE = 410
_NOT_THERE = 404


def run_k8s(plan: K8sPlan, pause_seconds: float = _PAUSE_SECONDS) -> int:
    """Submit the job, show its logs until it is over, and return 0 if it succeeded, else 1.

    After Ctrl-C the job continues; the status is 130. Raises `LaunchError` for what the cluster refuses.
    """
    library = _library()
    named = os.environ.get("KUBECONFIG")
    try:
        library.config.load_config(**({"config_file": named} if named else {}))
    except library.config.ConfigException as error:
        raise LaunchError(
            f"No Kubernetes cluster is configured here: {str(error).rstrip('.')}. Log in to one, so that kubectl works."
        ) from error
    job = _Submitted(plan, library, pause_seconds)
    job.submit()
    request, decides = plan.request, plan.decides
    what = f"{decides['kind'].lower()}/{decides['metadata']['name']} -n {request.namespace}"
    say(f"submitted; `kubectl describe {what}` shows it, `{plan.delete_command}` ends it.")
    try:
        return job.follow()
    except KeyboardInterrupt:
        say(f"the job continues; `{plan.delete_command}` ends it.")
        return 130


@dataclass(frozen=True)
class _Library:
    """The modules of the Kubernetes client that are used."""

    client: Any
    config: Any
    watch: Any
    unanswered: type[Exception]
    """The exception for a cluster that does not answer."""


@dataclass
class _Pod:
    """A pod whose log is shown."""

    thread: threading.Thread | None = None
    is_over: bool = False
    last: str = ""
    """When it printed the last line that was shown, by its own clock, in digits that can be compared."""
    shown_at: float = field(default_factory=time.monotonic)


class _Submitted:
    """The objects of one plan in the cluster. Two threads watch them, and one for each pod reads what it prints."""

    def __init__(self, plan: K8sPlan, library: _Library, pause_seconds: float) -> None:
        self._plan, self._library, self._pause_seconds = plan, library, pause_seconds
        api = library.client.ApiClient()
        self._core, self._batch = library.client.CoreV1Api(api), library.client.BatchV1Api(api)
        self._custom = library.client.CustomObjectsApi(api)
        self._rights = library.client.RbacAuthorizationV1Api(api)
        self._namespace = plan.request.namespace
        self._pods: dict[str, _Pod] = {}
        self._over = threading.Event()
        self._status, self._why = 1, ""
        self._complaint = ""

    def submit(self) -> None:
        """Make all objects; if one is refused, those made before are taken away."""
        made: list[Manifest] = []
        for manifest in self._plan.manifests:
            try:
                self._make(manifest)
            except (self._library.client.ApiException, self._library.unanswered) as error:
                for other in reversed(made):
                    self._unmake(other)
                if isinstance(error, self._library.unanswered):
                    raise LaunchError(f"The cluster does not answer: {str(error).rstrip('.')}.") from error
                raise LaunchError(f"The cluster refuses the {manifest['kind']}: {_reason(error)}") from error
            made.append(manifest)

    def follow(self) -> int:
        """Until the job is over, and all has been shown that pods have printed."""
        for watch in (self._watch_job, self._watch_pods):
            threading.Thread(target=self._repeat, args=(watch,), daemon=True).start()
        while not self._over.wait(0.2):  # so that Ctrl-C is heard
            pass
        with contextlib.suppress(self._library.client.ApiException, self._library.unanswered):
            for pod in self._core.list_namespaced_pod(self._namespace, label_selector=self._plan.pods).items:
                self._see(pod)  # it may have ended before a watch has told
        deadline = time.monotonic() + _LAST_LINES_SECONDS
        for pod in list(self._pods.values()):
            if pod.thread is not None:
                pod.thread.join(max(0.0, deadline - time.monotonic()))
        if self._why:
            say(self._why)
        return self._status

    # -- objects ----------------------------------------------------------------------------------------

    def _make(self, manifest: Manifest) -> None:
        kind = manifest["kind"]
        if kind in _OF_THE_CLIENT:
            self._call("create", kind)(self._namespace, manifest)
            return
        group, _, version = manifest["apiVersion"].partition("/")
        self._custom.create_namespaced_custom_object(group, version, self._namespace, _PLURALS[kind], manifest)

    def _unmake(self, manifest: Manifest) -> None:
        """Of the kinds that are made before others."""
        more = {"propagation_policy": "Background"} if manifest["kind"] == "Job" else {}
        with contextlib.suppress(self._library.client.ApiException, self._library.unanswered):
            self._call("delete", manifest["kind"])(manifest["metadata"]["name"], self._namespace, **more)

    def _call(self, verb: str, kind: str) -> Callable[..., Any]:
        """The client's method for objects of this kind, such as `delete_namespaced_role`."""
        api = {"Job": self._batch, "Role": self._rights, "RoleBinding": self._rights}.get(kind, self._core)
        method: Callable[..., Any] = getattr(api, f"{verb}_namespaced_{_OF_THE_CLIENT[kind]}")
        return method

    # -- what becomes of them ---------------------------------------------------------------------------

    def _repeat(self, watch: Callable[[], None]) -> None:
        """Repeat a watch, which ends by itself, or when the cluster does not answer."""
        while not self._over.is_set():
            try:
                watch()
                self._complaint = ""
            except self._library.client.ApiException as error:
                if error.status != _GONE:  # the last version that was seen is too old to continue from
                    self._complain(_reason(error))
            except self._library.unanswered as error:
                self._complain(str(error).rstrip("."))
            self._over.wait(self._pause_seconds)

    def _complain(self, why: str) -> None:
        if not self._complaint:
            say(f"the state of the job is unknown: {why.rstrip('.')}. It is asked again.")
        self._complaint = why

    def _watch_job(self) -> None:
        manifest = self._plan.decides
        group, _, version = manifest["apiVersion"].partition("/")
        place = (group, version, self._namespace, _PLURALS[manifest["kind"]])
        name = manifest["metadata"]["name"]
        try:
            self._look_at(self._custom.get_namespaced_custom_object(*place, name))
        except self._library.client.ApiException as error:
            if error.status != _NOT_THERE:
                raise
            self._end(1, f"the {manifest['kind']} {name} was deleted.")
        watch = self._library.watch.Watch()
        ask = self._custom.list_namespaced_custom_object
        selector = f"metadata.name={name}"
        for event in watch.stream(ask, *place, field_selector=selector, timeout_seconds=_WATCH_SECONDS):
            if event["type"] == "DELETED":
                self._end(1, f"the {manifest['kind']} {name} was deleted.")
            elif event["object"]["metadata"]["name"] == name:
                self._look_at(event["object"])
            if self._over.is_set():
                watch.stop()

    def _look_at(self, found: Manifest) -> None:
        for condition in found.get("status", {}).get("conditions") or ():
            if condition["status"] != "True" or condition["type"] not in {*_WELL, "Failed"}:
                continue
            is_well = condition["type"] in _WELL
            why = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            self._end(0 if is_well else 1, "" if is_well or not why else f"the job has failed ({why.rstrip('.')}).")

    def _end(self, status: int, why: str) -> None:
        if not self._over.is_set():
            self._status, self._why = status, why
            self._over.set()

    # -- what pods print --------------------------------------------------------------------------------

    def _watch_pods(self) -> None:
        watch = self._library.watch.Watch()
        ask, selector = self._core.list_namespaced_pod, self._plan.pods
        for event in watch.stream(ask, self._namespace, label_selector=selector, timeout_seconds=_WATCH_SECONDS):
            self._see(event["object"], is_deleted=event["type"] == "DELETED")
            if self._over.is_set():
                watch.stop()

    def _see(self, found: Any, is_deleted: bool = False) -> None:
        name, phase = found.metadata.name, found.status.phase
        pod = self._pods.setdefault(name, _Pod())
        pod.is_over = is_deleted or phase in ("Succeeded", "Failed")
        if pod.thread is None and not is_deleted and phase in ("Running", "Succeeded", "Failed"):
            pod.thread = threading.Thread(target=self._show, args=(name, pod), daemon=True)
            pod.thread.start()

    def _show(self, name: str, pod: _Pod) -> None:
        """All that a pod prints, though the connection may end before it does."""
        while True:
            was_over = pod.is_over
            try:
                self._show_what_comes(name, pod)
            except self._library.client.ApiException as error:
                if error.status == _NOT_THERE:
                    return
            except self._library.unanswered:
                pass
            if was_over or (self._over.is_set() and pod.is_over):
                return
            time.sleep(self._pause_seconds)

    def _show_what_comes(self, name: str, pod: _Pod) -> None:
        since = {"since_seconds": int(time.monotonic() - pod.shown_at) + 2} if pod.last else {}
        stream = self._core.read_namespaced_pod_log(
            name, self._namespace, follow=True, timestamps=True, _preload_content=False, **since
        )
        for line in stream:
            stamp, _, text = line.decode(errors="backslashreplace").rstrip("\n").partition(" ")
            if (moment := _in_digits(stamp)) <= pod.last:
                continue  # it was shown before the connection ended
            pod.last, pod.shown_at = moment, time.monotonic()
            sys.stdout.write(f"{name}: {text}\n")
            sys.stdout.flush()


def _in_digits(stamp: str) -> str:
    """`2026-01-02T03:04:05.6Z` with all nine digits, so that later ones are greater."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _library() -> _Library:
    try:
        from kubernetes import client, config, watch
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise LaunchError(
            "Submitting to Kubernetes needs its client: pip install 'shardwise[k8s]'. Or give the output of "
            "--dry-run to `kubectl apply -f -`."
        ) from error
    return _Library(client, config, watch, HTTPError)


def _reason(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.reason} ({error.status})"
