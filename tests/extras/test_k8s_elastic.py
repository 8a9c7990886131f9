"""Elastic jobs on a server that speaks Kubernetes' API; pods are processes, and a Job's controller is played."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from shardwise.launch.job import Elastic, Job
from shardwise.launch.places.k8s import K8sPlan, PodRequest, plan_k8s
from shardwise.launch.places.k8s_run import run_k8s
from tests.extras.k8s_server import Cluster
from tests.extras.test_k8s_manifests import tell_of
from tests.faults import survivor
from tests.faults.test_pods import losses_of
from tests.free_port import free_port
from tests.patience import wait_until

pytestmark = pytest.mark.timeout(300)
SOON_SECONDS = 120.0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    server = Cluster(warm.python(), {**warm.RANKS_TOO, "OMP_NUM_THREADS": "1", "PAUSE_SECONDS": "0.05"})
    tell_of(server, tmp_path, monkeypatch)
    yield server
    server.close()


class Submitted:
    """`run_k8s` in a thread, and what becomes of it."""

    def __init__(self, cluster: Cluster, plan: K8sPlan, out: Path) -> None:
        self.cluster, self.out, self.status = cluster, out, -1
        self._thread = threading.Thread(target=self._run, args=(plan,), daemon=True)
        self._thread.start()

    def _run(self, plan: K8sPlan) -> None:
        self.status = run_k8s(plan, 0.1)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        wait_until(lambda: holds() or not self._thread.is_alive(), self.said, seconds=SOON_SECONDS)
        assert holds(), self.said()

    def said(self) -> dict[str, str]:
        return {pod.name: self.cluster.log(pod) for job in self.cluster.jobs.values() for pod in job.pods}

    def wait_for_ranks(self, number: int) -> None:
        self.wait_until(lambda: len([path for path in self.out.glob("pid-*") if path.read_text()]) >= number)

    def end(self) -> int:
        time.sleep(1)
        (self.out / "enough").write_text("")
        self._thread.join(SOON_SECONDS)
        return self.status


def survivors(out: Path, kind: str, nodes: int, elastic: Elastic) -> K8sPlan:
    script = (survivor.__file__, str(out), "zero3", "engine", str(10**6))
    job = Job(script, nproc=1, port=free_port(2), grace_seconds=3, elastic=elastic)
    return plan_k8s(job, PodRequest("image:1", nodes=nodes, kind=kind, name="train"), {})


def test_pods_of_an_indexed_job_come_and_go(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is killed, one is evicted, and the Job gets one more; losses are those of the plain model."""
    job = Submitted(cluster, survivors(tmp_path, "job", 2, Elastic(1, 3, launcher_timeout_seconds=0)), tmp_path)
    job.wait_for_ranks(2)
    first, second = cluster.pods("train-hosts")
    cluster.kill(second)
    job.wait_for_ranks(3)
    cluster.evict(first)
    job.wait_for_ranks(4)
    cluster.jobs["train-hosts"].spec |= {"parallelism": 3, "completions": 3}
    job.wait_for_ranks(5)
    (launcher,) = cluster.pods("train-launcher")
    assert job.end() == 0, cluster.log(launcher)
    job_of_pods = cluster.jobs["train-hosts"]
    job.wait_until(lambda: job_of_pods.ending == "Complete") if not job_of_pods.ending else None
    losses_of(tmp_path, 3)
    said = capsys.readouterr().out
    assert f"{launcher.name}: shardwise: host {second.name} is gone: rank" in said
    assert f"host {first.name} received SIGTERM: 1 rank there leaves after its step." in said
    third = next(pod for pod in job_of_pods.pods if pod.index == 2)
    assert f"host {third.name} joins, with 1 slot." in said


def test_the_pod_of_the_launcher_is_lost_and_a_jobset_begins_anew(cluster: Cluster, tmp_path: Path) -> None:
    job = Submitted(cluster, survivors(tmp_path, "jobset", 2, Elastic(2, 2, launcher_timeout_seconds=0)), tmp_path)
    job.wait_for_ranks(2)
    before = {path: path.read_text() for path in tmp_path.glob("pid-*")}
    pods = cluster.pods("train-hosts-0")
    cluster.evict(*cluster.pods("train-launcher-0"))
    job.wait_until(lambda: all(path.read_text() not in ("", before[path]) for path in before))
    assert cluster.pods("train-hosts-0") == pods, "they were not replaced"
    assert job.end() == 0
    losses_of(tmp_path, 2)


def test_a_script_that_fails_ends_both_jobs(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no')\n")
    job = Job((str(script),), nproc=1, port=free_port(2), elastic=Elastic(1, 1, retries=0, launcher_timeout_seconds=0))
    assert run_k8s(plan_k8s(job, PodRequest("image:1", name="train"), {}), 0.1) == 1
    shown = capsys.readouterr()
    assert "ValueError: no" in shown.out
    assert "the job has failed (Over: train-launcher-0-" in shown.err
    wait_until(lambda: cluster.jobs["train-hosts"].ending == "Failed")
