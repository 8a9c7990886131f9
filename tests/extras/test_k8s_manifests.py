"""Manifests held to the published schemas, and submitted to a server that speaks Kubernetes' API over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pytest
import yaml

from shardwise.errors import LaunchError
from shardwise.launch.job import Job
from shardwise.launch.places.k8s import K8sPlan, PodRequest, plan_k8s
from shardwise.launch.places.k8s_run import run_k8s

VERSIONS = ("1.29", "1.37")
LABELS = ("batch.kubernetes.io/job-name", "jobset.sigs.k8s.io/jobset-name")


def plan(kind: str, **fields: Any) -> K8sPlan:
    fields = {"nodes": 2, "gpus_per_node": 8, "queue": "q"} | fields
    job = Job(("train.py", "--lr", "1"), nproc=8, threads=2)
    return plan_k8s(job, PodRequest("image:1", kind=kind, name="train", **fields), {"A": "b"})


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_take_job_and_service(version: str) -> None:
    manifests = plan("job", secrets=("s",), claims={"data": "/data"}).manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    wrong = {**manifests[1], "spec": {**manifests[1]["spec"], "paralelism": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize(
    ("kind", "model"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_models_of_kubeflow_keep_all_of_it(kind: str, model: str) -> None:
    """They drop what they do not know, so that what comes back shows whether every name was right."""
    (manifest,) = plan(kind).manifests
    assert getattr(kubeflow, model).from_dict(manifest).to_dict() == manifest
    if kind == "jobset":
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "t"}}
        spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        kubernetes_validate.validate({**inner, "spec": spec}, VERSIONS[-1], strict=True)


class Server(ThreadingHTTPServer):
    """Objects as they were posted; pods run for a moment, and then the job is over as `ending` says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.posted: dict[str, dict[str, Any]] = {}
        self.deleted: list[str] = []
        self.refuses = ""
        self.ending = "Complete"
        self.asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["kind"] == self.server.refuses:
            self.answer({"kind": "Status", "message": f"{body['metadata']['name']} already exists"}, 409)
            return
        self.server.posted[self.path] = body
        self.answer(body, 201)

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        self.answer({"kind": "Service", "apiVersion": "v1"})

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if path.endswith("/log"):
            self.send_response(200)
            self.end_headers()
            for number in range(2):
                self.wfile.write(f"line {number}\n".encode())
                self.wfile.flush()
                time.sleep(0.05)
        elif path.endswith("/pods"):
            assert unquote(query) in [f"labelSelector={name}=train" for name in LABELS]
            phase = "Pending" if self.server.asked < 1 else "Running"
            pods = [{"metadata": {"name": f"train-{n}"}, "status": {"phase": phase}} for n in range(2)]
            self.answer({"kind": "PodList", "apiVersion": "v1", "items": pods})
        else:
            self.server.asked += 1
            ending = [{"type": self.server.ending, "status": "True"}] if self.server.asked > 3 else []
            self.answer({"status": {"conditions": ending}})

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}
        contexts = [{"name": "x", "context": {"cluster": "c", "user": "u"}}]
        users = [{"name": "u", "user": {"token": "t"}}]
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster]}
        (tmp_path / "config").write_text(yaml.safe_dump(config | {"contexts": contexts, "users": users}))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("kind", "ending", "status"), [("job", "Complete", 0), ("job", "Failed", 1), ("jobset", "Completed", 0)]
)
def test_submitted_and_followed(
    server: Server, kind: str, ending: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.ending = ending
    whole = plan(kind)
    assert run_k8s(whole, look_seconds=0.05) == status
    assert list(server.posted.values()) == list(whole.manifests)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == [f"train-{pod}: line {line}" for pod in range(2) for line in range(2)]
    assert f"`kubectl delete {kind}/train -n default` ends it" in shown.err


def test_what_the_cluster_refuses(server: Server) -> None:
    """The service of a job that cannot be is taken away again."""
    server.refuses = "Job"
    with pytest.raises(LaunchError, match="refuses the Job: train already exists"):
        run_k8s(plan("job"))
    assert server.deleted == ["/api/v1/namespaces/default/services/train"]
    server.shutdown()
    server.server_close()
    with pytest.raises(LaunchError, match="does not answer"):
        run_k8s(plan("job"))
