"""A server that speaks Kubernetes' API over HTTP, with watches, and whose pods are processes of this machine.

A pod with a service account finds the API by TLS, with a token that may do what its Role says. A changed Job is held to
the published schema.

It plays the Job controller (pods are replaced as `podFailurePolicy` and `backoffLimitPerIndex` say, `parallelism` and
`completions` may change), the JobSet and TrainJob controllers as far as they make Jobs, the kubelet, and DNS: every
name of a Service is 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import kubernetes_validate

JOB_NAME, SET_NAME = "batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/jobset-name"
Object = dict[str, Any]


@dataclass
class Pod:
    """One process, and what it prints."""

    found: Object
    index: int
    process: subprocess.Popen[bytes] | None = None
    lines: list[tuple[str, str]] = field(default_factory=list)
    is_evicted: bool = False
    num_served: int = 0

    @property
    def name(self) -> str:
        return str(self.found["metadata"]["name"])

    @property
    def phase(self) -> str:
        return str(self.found["status"]["phase"])


@dataclass
class Job:
    """One Job, of a set perhaps."""

    name: str
    spec: Object
    labels: dict[str, str]
    pods: list[Pod] = field(default_factory=list)
    ending: str = ""
    message: str = ""


class Cluster(ThreadingHTTPServer):
    """All objects by path, and everything that has happened to them in order."""

    daemon_threads = True

    def __init__(self, python: str = "python", environment: Mapping[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.python, self.environment = python, environment or {}
        self.objects: dict[str, Object] = {}
        self.events: list[tuple[str, str, Object]] = []
        self.changed = threading.Condition()
        self.jobs: dict[str, Job] = {}
        self.refuses = ""
        self.is_down = False
        self.num_refused = 0
        """How often somebody has asked for the state of objects while it was down."""
        self.cuts_logs_after = 0
        """Every log's connection ends after so many lines that were not sent before."""
        self.admits: int | None = None
        """So many pods of Jobs with several may run, as a queue admits them; without, all."""
        self.has_elastic_jobsets = True
        """JobSet's gate of that name."""
        self.token = ""
        self.secure: SecureDoor | None = None
        self._owners: dict[str, list[Job]] = {}
        self._num_pods = 0
        self._closing = threading.Event()
        self.account: dict[str, str] = {}
        """The environment of pods with a service account."""
        for run in (self.serve_forever, self._control):
            threading.Thread(target=run, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def open_secure_door(self, folder: Path) -> None:
        """For pods: an address with TLS; `folder` gets what a service account has."""
        folder.mkdir(exist_ok=True)
        self.token = "token-of-an-account"
        (folder / "token").write_text(self.token)
        (folder / "namespace").write_text("default")
        name = ["-subj", "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(folder / "key"), "-out", str(folder / "ca.crt"), "-days", "2", "-nodes"]
        kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        subprocess.run(["openssl", "req", *kind, *files, *name], check=True, capture_output=True)
        self.secure = SecureDoor(self, folder / "ca.crt", folder / "key")
        port = str(self.secure.server_address[1])
        own = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
        self.account = {**own, "SHARDWISE_SERVICE_ACCOUNT": str(folder)}

    def close(self) -> None:
        self._closing.set()
        if self.secure is not None:
            self.secure.shutdown()
            self.secure.server_close()
        self.is_down = True
        with self.changed:
            self.changed.notify_all()
        self.shutdown()
        self.server_close()
        for job in self.jobs.values():
            self._kill_pods(job)

    def pods(self, job: str, phase: str = "Running") -> list[Pod]:
        return [pod for pod in self.jobs[job].pods if pod.phase == phase]

    def log(self, pod: Pod) -> str:
        return "".join(f"{text}\n" for _, text in pod.lines)

    def kill(self, pod: Pod) -> None:
        """As when a node is lost."""
        assert pod.process is not None
        pod.process.kill()

    def evict(self, pod: Pod) -> None:
        """As when a node is drained."""
        assert pod.process is not None
        pod.is_evicted = True
        pod.process.terminate()

    # -- objects ----------------------------------------------------------------------------------------

    def put(self, kind: str, path: str, found: Object) -> None:
        with self.changed:
            if kind == "DELETED":
                self.objects.pop(path, None)
            else:
                self.objects[path] = found
            found.setdefault("metadata", {})["resourceVersion"] = str(len(self.events) + 1)
            self.events.append((kind, path, json.loads(json.dumps(found))))
            self.changed.notify_all()

    def make(self, path: str, body: Object) -> None:
        self.put("ADDED", f"{path}/{body['metadata']['name']}", body)
        name, spec = body["metadata"]["name"], body.get("spec", {})
        owner = f"{path}/{name}"
        if body["kind"] == "Job":
            self._owners[owner] = [Job(name, spec, {JOB_NAME: name})]
        elif body["kind"] == "JobSet":
            parts = [(part["name"], part["template"]["spec"]) for part in spec["replicatedJobs"]]
            self._owners[owner] = [
                Job(f"{name}-{part}-0", inner, {SET_NAME: name, JOB_NAME: f"{name}-{part}-0"}) for part, inner in parts
            ]
        elif body["kind"] == "TrainJob":
            trainer = spec["trainer"]
            template = {"spec": {"containers": [{"name": "node", "command": trainer["command"], "env": []}]}}
            many = {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"], "backoffLimit": 0}
            self._owners[owner] = [Job(f"{name}-node-0", many | {"template": template}, {SET_NAME: name})]
        for job in self._owners.get(owner, ()):
            self.jobs[job.name] = job

    def change(self, path: str, kind: str, body: Any) -> str:
        """Apply a patch; why it is refused, if it is."""
        found, before = self.objects[path], json.dumps(self.objects[path])
        if kind == "application/merge-patch+json":
            assert found["kind"] == "Job", "no other kind is changed so"
            assert set(body) == {"spec"}
            found["spec"].update(body["spec"])  # the controllers have the same object
            if found["spec"]["parallelism"] != found["spec"]["completions"]:
                found["spec"].update(json.loads(before)["spec"])
                return "spec.completions: Invalid value: must be equal to parallelism to be changed"
            kubernetes_validate.validate({name: found[name] for name in found if name != "status"}, "1.37", strict=True)
        else:
            assert kind == "application/json-patch+json"
            assert found["kind"] == "JobSet"
            if not self.has_elastic_jobsets:
                return "spec.replicatedJobs: Invalid value: field is immutable"
            for step in body:
                *way, last = step["path"].strip("/").split("/")
                at: Any = found
                for name in way:
                    at = at[int(name)] if isinstance(at, list) else at[name]
                if step["op"] == "test" and at[last] != step["value"]:
                    return "testing path failed"
                if step["op"] == "replace":
                    assert last in at, "replaces what is there"
                    at[last] = step["value"]
        self.put("MODIFIED", path, found)
        return ""

    def may_change(self, path: str, token: str) -> bool:
        """Whether a role says so that is bound to the account of pods."""
        group, _, rest = path.removeprefix("/apis/").partition("/")
        resource, name = rest.split("/")[-2:]
        roles = [one for one in self.objects.values() if one["kind"] == "Role"]
        bound = {one["roleRef"]["name"] for one in self.objects.values() if one["kind"] == "RoleBinding"}
        rules = [rule for role in roles if role["metadata"]["name"] in bound for rule in role["rules"]]
        return token == f"Bearer {self.token}" and any(
            group in rule["apiGroups"] and resource in rule["resources"]
            and name in rule["resourceNames"] and "patch" in rule["verbs"]
            for rule in rules
        )  # fmt: skip

    def delete(self, path: str) -> None:
        for job in self._owners.pop(path, ()):
            del self.jobs[job.name]
            self._kill_pods(job)
        self.put("DELETED", path, self.objects.get(path, {}))

    # -- controllers ------------------------------------------------------------------------------------

    def _control(self) -> None:
        while not self._closing.wait(0.05):
            for owner, jobs in list(self._owners.items()):
                for job in jobs:
                    if not job.ending:
                        self._see_to(job)
                self._conclude(owner, jobs)

    def _see_to(self, job: Job) -> None:
        done = set()
        for pod in job.pods:
            assert pod.process is not None
            code = pod.process.poll()
            if code is not None and pod.phase == "Running":
                pod.found["status"]["phase"] = "Failed" if code else "Succeeded"
                self.put("MODIFIED", self._path(pod), pod.found)
                self._judge(job, pod, 128 - code if code < 0 else code)
            if pod.phase == "Succeeded":
                done.add(pod.index)
        if job.ending:
            self._kill_pods(job)
            return
        wanted = job.spec["completions"]
        for pod in job.pods:
            if pod.index >= wanted and pod.phase == "Running" and not pod.is_evicted:
                self.evict(pod)
        there = {pod.index for pod in job.pods if pod.phase == "Running"}
        if len(done) == wanted:
            job.ending = "Complete"
        for index in sorted(set(range(wanted)) - done - there):
            if self.admits is None or job.name.endswith("-launcher") or len(self.pods(job.name)) < self.admits:
                self._start(job, index)
        if self.admits is not None and not job.name.endswith("-launcher"):
            running = [pod for pod in self.pods(job.name) if not pod.is_evicted]
            for pod in running[: max(0, len(running) - self.admits)]:
                self.evict(pod)  # not those with the highest indexes, as Kueue does not know them

    def _judge(self, job: Job, pod: Pod, code: int) -> None:
        if not code:
            return
        for rule in job.spec.get("podFailurePolicy", {}).get("rules", ()):
            if "onPodConditions" in rule and pod.is_evicted:
                return
            codes = rule.get("onExitCodes")
            if codes and (code in codes["values"]) == (codes["operator"] == "In"):
                assert rule["action"] == "FailJob"
                job.ending, job.message = "Failed", f"{pod.name} ended with {code}"
                return
        num_failed = sum(other.phase == "Failed" and not other.is_evicted for other in job.pods)
        if num_failed > job.spec.get("backoffLimitPerIndex", job.spec.get("backoffLimit", 6)):
            job.ending, job.message = "Failed", "Job has reached the specified backoff limit"

    def _conclude(self, owner: str, jobs: list[Job]) -> None:
        found = self.objects[owner]
        if found.get("status", {}).get("conditions"):
            return
        targets = found["spec"].get("successPolicy", {}).get("targetReplicatedJobs", ())
        decisive = [job for job in jobs if any(job.name.endswith(f"-{name}-0") for name in targets)] or jobs
        failed = [job for job in jobs if job.ending == "Failed"]
        if not failed and not all(job.ending == "Complete" for job in decisive):
            return
        well = "Completed" if found["kind"] == "JobSet" else "Complete"
        why = {"reason": "Over", "message": failed[0].message} if failed else {}
        condition = {"type": "Failed" if failed else well, "status": "True", **why}
        self.put("MODIFIED", owner, found | {"status": {"conditions": [condition]}})
        if found["kind"] == "JobSet":
            for job in jobs:
                job.ending = job.ending or "Complete"
                self._kill_pods(job)

    def _kill_pods(self, job: Job) -> None:
        for pod in job.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.terminate()
                try:
                    pod.process.wait(20)
                except subprocess.TimeoutExpired:
                    pod.process.kill()
            if pod.phase == "Running":
                pod.found["status"]["phase"] = "Failed"
                self.put("MODIFIED", self._path(pod), pod.found)

    # -- a node -----------------------------------------------------------------------------------------

    def _start(self, job: Job, index: int) -> None:
        template = job.spec["template"]
        (container,) = template["spec"]["containers"]
        self._num_pods += 1
        labels = {**template.get("metadata", {}).get("labels", {}), **job.labels}
        metadata = {"name": f"{job.name}-{index}-{self._num_pods:05x}", "namespace": "default", "labels": labels}
        found = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Pending"}}
        pod = Pod(found, index)
        self.put("ADDED", self._path(pod), found)
        env = {"JOB_COMPLETION_INDEX": str(index)}
        env |= self.account if template["spec"].get("serviceAccountName") else {}
        env |= {one["name"]: self._value(one, metadata["name"]) for one in container.get("env", ())}
        words = [re.sub(r"\$?\$\((\w+)\)", lambda match: _expanded(match, env), word) for word in container["command"]]
        if subdomain := template["spec"].get("subdomain") or job.labels.get(SET_NAME):
            words = [re.sub(rf"[-a-z0-9]+\.{subdomain}\b", "127.0.0.1", word) for word in words]
        words[0] = self.python if words[0] == "python" else words[0]
        pod.process = subprocess.Popen(
            words, env={**os.environ, **self.environment, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        threading.Thread(target=self._read, args=(pod,), daemon=True).start()
        job.pods.append(pod)
        found["status"]["phase"] = "Running"
        self.put("MODIFIED", self._path(pod), found)

    def _value(self, one: Object, pod: str) -> str:
        source = one.get("valueFrom", {})
        if "secretKeyRef" in source:
            named = source["secretKeyRef"]
            return str(self.objects[f"/api/v1/namespaces/default/secrets/{named['name']}"]["stringData"][named["key"]])
        if "fieldRef" in source:
            return {"metadata.name": pod, "status.podIP": "127.0.0.1"}[source["fieldRef"]["fieldPath"]]
        return str(one["value"])

    def _read(self, pod: Pod) -> None:
        assert pod.process is not None
        assert pod.process.stdout is not None
        for line in pod.process.stdout:
            stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f").rstrip("0") + "Z"
            with self.changed:
                pod.lines.append((stamp, line.decode().rstrip("\n")))
                self.changed.notify_all()
        pod.process.stdout.close()

    def _path(self, pod: Pod) -> str:
        return f"/api/v1/namespaces/default/pods/{pod.name}"


def _expanded(match: re.Match[str], env: Mapping[str, str]) -> str:
    return match[0][1:] if match[0].startswith("$$") else env.get(match[1], match[0])


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Cluster
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["kind"] == self.server.refuses:
            self.answer({"kind": "Status", "message": f"{body['metadata']['name']} already exists"}, 409)
            return
        self.server.make(self.path, body)
        self.answer(body, 201)

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.is_down:
            self.answer({"kind": "Status", "message": "the server is starting"}, 503)
        elif self.path not in self.server.objects:
            self.answer({"kind": "Status", "message": "not found"}, 404)
        elif not self.server.may_change(self.path, self.headers["Authorization"]):
            self.answer({"kind": "Status", "message": "the account cannot patch this resource"}, 403)
        elif why := self.server.change(self.path, self.headers["Content-Type"], body):
            self.answer({"kind": "Status", "message": why}, 422)
        else:
            self.answer(self.server.objects[self.path])

    def do_DELETE(self) -> None:
        self.server.delete(self.path.partition("?")[0])
        self.answer({"kind": "Status", "apiVersion": "v1"})

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        if self.server.is_down:
            self.server.num_refused += not path.endswith("/log")
            self.answer({"kind": "Status", "message": "the server is starting"}, 503)
        elif path.endswith("/log"):
            self._log(path.rsplit("/", 2)[1], asked)
        elif "watch" in asked:
            self._watch(path, asked)
        elif path in self.server.objects:
            self.answer(self.server.objects[path])
        elif path.endswith("/pods"):
            found = [one for where, one in self.server.objects.items() if self._fits(path, where, one, asked)]
            self.answer({"kind": "PodList", "apiVersion": "v1", "items": found})
        else:
            self.answer({"kind": "Status", "message": "not found"}, 404)

    def _fits(self, path: str, where: str, found: Object, asked: Mapping[str, str]) -> bool:
        if where.rpartition("/")[0] != path:
            return False
        name, _, value = asked.get("labelSelector", "").partition("=")
        if name and found["metadata"].get("labels", {}).get(name) != value:
            return False
        _, _, wanted = asked.get("fieldSelector", "").partition("metadata.name=")
        return not wanted or found["metadata"]["name"] == wanted

    def _watch(self, path: str, asked: Mapping[str, str]) -> None:
        server, sent = self.server, 0
        self._begin()
        deadline = time.monotonic() + float(asked.get("timeoutSeconds", 60))
        while time.monotonic() < deadline and not server.is_down:
            with server.changed:
                server.changed.wait(0.5 if len(server.events) == sent else 0)
                new, sent = server.events[sent:], len(server.events)
            for kind, where, found in new:
                if self._fits(path, where, found, asked):
                    self._chunk(json.dumps({"type": kind, "object": found}).encode() + b"\n")
        self._chunk(b"")

    def _log(self, name: str, asked: Mapping[str, str]) -> None:
        server = self.server
        pod = next((pod for job in server.jobs.values() for pod in job.pods if pod.name == name), None)
        if pod is None:
            self.answer({"kind": "Status", "message": "not found"}, 404)
            return
        self._begin()
        since, sent, served = asked.get("sinceSeconds"), 0, pod.num_served
        while True:
            with server.changed:
                server.changed.wait(0.1 if len(pod.lines) == sent else 0)
                new, sent = pod.lines[sent:], len(pod.lines)
                is_over = pod.phase != "Running" or server.is_down
            for number, (stamp, text) in enumerate(new, start=sent - len(new) + 1):
                age = datetime.now(UTC) - datetime.fromisoformat(stamp)
                if since is not None and age.total_seconds() > float(since):
                    continue
                self._chunk(f"{stamp} {text}\n".encode())
                pod.num_served = max(pod.num_served, number)
                if server.cuts_logs_after and number >= served + server.cuts_logs_after:
                    self._chunk(b"")
                    return
            if is_over and not new:
                self._chunk(b"")
                return

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, block: bytes) -> None:
        """Part of an answer; an empty one ends it."""
        with contextlib.suppress(ConnectionError):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
            self.wfile.flush()

    def answer(self, body: Object, status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


class SecureDoor(ThreadingHTTPServer):
    """The same server, by TLS."""

    daemon_threads = True

    def __init__(self, cluster: Cluster, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self._cluster = cluster
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        Handler(request, client_address, self._cluster)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust it hangs up."""


def interrupt_soon(seconds: float) -> None:
    """Ctrl-C, to the process of the test."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
