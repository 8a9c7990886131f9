"""Manifests held to the published schemas, and submitted to a server that speaks Kubernetes' API over HTTP."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pytest
import yaml

from shardwise.errors import LaunchError
from shardwise.launch.job import Elastic, Job
from shardwise.launch.places.k8s import K8sPlan, PodRequest, plan_k8s
from shardwise.launch.places.k8s_run import run_k8s
from tests.extras.k8s_server import Cluster, interrupt_soon
from tests.patience import wait_until

VERSIONS = ("1.29", "1.37")


def plan(kind: str, **fields: Any) -> K8sPlan:
    fields = {"nodes": 2, "gpus_per_node": 8, "queue": "q"} | fields
    elastic = fields.pop("elastic", None)
    job = Job(("train.py", "--lr", "1"), nproc=8, threads=2, elastic=elastic)
    return plan_k8s(job, PodRequest("image:1", kind=kind, name="train", **fields), {"A": "b"})


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_take_job_and_service(version: str) -> None:
    manifests = plan("job", secrets=("s",), claims={"data": "/data"}).manifests
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    wrong = {**manifests[1], "spec": {**manifests[1]["spec"], "paralelism": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_schemas_take_an_elastic_job(version: str) -> None:
    manifests = plan("job", elastic=Elastic(8, 24), secrets=("s",), claims={"data": "/data"}).manifests
    assert [manifest["kind"] for manifest in manifests] == ["Secret", "Service", "Job", "Job"]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    ("kind", "model"), [("jobset", "JobsetV1alpha2JobSet"), ("trainjob", "TrainerV1alpha1TrainJob")]
)
def test_models_of_kubeflow_keep_all_of_it(kind: str, model: str) -> None:
    """They drop what they do not know, so that what comes back shows whether every name was right."""
    (manifest,) = plan(kind).manifests
    assert getattr(kubeflow, model).from_dict(manifest).to_dict() == manifest
    if kind == "jobset":
        whole = plan(kind, elastic=Elastic(8, 24)).manifests[-1]
        assert getattr(kubeflow, model).from_dict(whole).to_dict() == whole
        inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "t"}}
        spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        kubernetes_validate.validate({**inner, "spec": spec}, VERSIONS[-1], strict=True)


def saying(whole: K8sPlan, script: str) -> K8sPlan:
    """The same, with pods that run a shell script."""

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: ["sh", "-c", script] if key == "command" else changed(one) for key, one in value.items()}
        return [changed(one) for one in value] if isinstance(value, list) else value

    return dataclasses.replace(whole, manifests=tuple(changed(manifest) for manifest in whole.manifests))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    server = Cluster()
    tell_of(server, tmp_path, monkeypatch)
    yield server
    server.close()


def tell_of(server: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kubectl` finds it."""
    cluster = {"name": "c", "cluster": {"server": server.url}}
    contexts = [{"name": "x", "context": {"cluster": "c", "user": "u"}}]
    users = [{"name": "u", "user": {"token": "t"}}]
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster]}
    (folder / "config").write_text(yaml.safe_dump(config | {"contexts": contexts, "users": users}))
    monkeypatch.setenv("KUBECONFIG", str(folder / "config"))


TWO_LINES = "echo line 0; sleep 0.2; echo line 1"


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("status", [0, 1])
def test_submitted_and_followed(cluster: Cluster, kind: str, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    whole = saying(plan(kind), f"{TWO_LINES}; sleep 0.5; exit {status}")
    assert run_k8s(whole, 0.05) == status
    posted = [found for action, _, found in cluster.events if action == "ADDED" and found["kind"] != "Pod"]
    assert [found["spec"] for found in posted] == [manifest["spec"] for manifest in whole.manifests]
    shown = capsys.readouterr()
    assert sorted(line.partition(": ")[2] for line in shown.out.splitlines()) == ["line 0"] * 2 + ["line 1"] * 2
    assert len({line.partition(": ")[0] for line in shown.out.splitlines()}) == 2
    assert f"`{whole.delete_command}` ends it" in shown.err
    assert ("the job has failed (Over: Job has reached" in shown.err) == bool(status)
    if kind != "job":
        assert whole.delete_command == f"kubectl delete {kind}/train -n default"


def test_logs_whose_connection_ends_go_on_where_they_were(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.cuts_logs_after = 2
    whole = saying(plan("job", nodes=1), "for i in 0 1 2 3 4 5 6; do echo line $i; sleep 0.05; done; sleep 1")
    assert run_k8s(whole, 0.05) == 0
    shown = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert shown == [f"line {number}" for number in range(7)]


def runs(cluster: Cluster) -> bool:
    return "train" in cluster.jobs and bool(cluster.pods("train"))


def test_an_api_server_that_is_away_for_a_while(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_away() -> None:
        wait_until(lambda: runs(cluster))
        cluster.is_down = True
        wait_until(lambda: cluster.num_refused)
        cluster.is_down = False
        (tmp_path / "back").touch()

    with ThreadPoolExecutor(1) as pool:
        away = pool.submit(is_away)
        assert (
            run_k8s(saying(plan("job"), f"{TWO_LINES}; until [ -e {tmp_path}/back ]; do sleep 0.05; done"), 0.05) == 0
        )
        away.result()
    said = capsys.readouterr().err
    assert said.count("the state of the job is unknown: the server is starting. It is asked again.") >= 1


def test_a_deleted_job(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    def delete() -> None:
        wait_until(lambda: runs(cluster))
        cluster.delete("/apis/batch/v1/namespaces/default/jobs/train")

    with ThreadPoolExecutor(1) as pool:
        deleted = pool.submit(delete)
        assert run_k8s(saying(plan("job"), "exec sleep 60"), 0.05) == 1
        deleted.result()
    assert "the Job train was deleted." in capsys.readouterr().err


def test_ctrl_c_says_how_to_end_it(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        interrupt_soon(3)
        assert run_k8s(saying(plan("job"), "exec sleep 60"), 0.05) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    command = "kubectl delete job,service -n default -l app.kubernetes.io/instance=train"
    assert f"the job continues; `{command}` ends it." in capsys.readouterr().err
    assert len(cluster.pods("train")) == 2


def test_what_the_cluster_refuses(cluster: Cluster) -> None:
    """What was made of a job that cannot be is taken away again."""
    cluster.refuses = "Job"
    with pytest.raises(LaunchError, match="refuses the Job: train-hosts already exists"):
        run_k8s(plan("job", elastic=Elastic(1, 16)))
    assert not cluster.objects
    assert [path.rpartition("/")[0] for kind, path, _ in cluster.events if kind == "DELETED"] == [
        f"/api/v1/namespaces/default/{kind}" for kind in ("services", "secrets")
    ]
    cluster.shutdown()
    cluster.server_close()
    with pytest.raises(LaunchError, match="does not answer"):
        run_k8s(plan("job"))
