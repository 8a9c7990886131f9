"""`--autoscale` on a server that speaks Kubernetes' API: its launcher changes the number of its pods, with the rights
that its manifests give it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pytest

import warm
from shardwise.comm.members import MemberMessage, Pace
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.autoscale import Fill, Gain, Sizes, parse_policy
from shardwise.launch.elastic.job_notes import FolderNotes
from shardwise.launch.elastic.scaling import Scaling
from shardwise.launch.job import Elastic, Job
from shardwise.launch.places.k8s import K8sPlan, PodRequest, plan_k8s
from shardwise.launch.places.k8s_scale import ApiServer, ScaledPods, Target, completions_for
from tests.admissions import AtOnce, training
from tests.extras.k8s_server import Cluster
from tests.extras.test_k8s_elastic import Submitted
from tests.extras.test_k8s_manifests import VERSIONS, saying, tell_of
from tests.faults import survivor
from tests.faults.test_pods import losses_of
from tests.free_port import free_port
from tests.patience import wait_until
from tests.thorough import soak

MONDAY = datetime(2026, 11, 30, tzinfo=UTC)


def plan(kind: str = "job", policy: str = "fill", nproc: int = 8, **fields: Any) -> K8sPlan:
    elastic = Elastic(nproc, 8 * nproc, autoscale=parse_policy(policy))
    job = Job(("train.py", "--lr", "1"), nproc=nproc, elastic=elastic)
    return plan_k8s(job, PodRequest("image:1", kind=kind, name="train", **({"nodes": 2} | fields)), {})


# -- manifests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("queue", "topology"), [("", ""), ("", "rack"), ("q", "cloud.example.com/rack"), ("q", "kubernetes.io/hostname:2")]
)
def test_kubernetes_schemas_take_a_job_that_grows(version: str, queue: str, topology: str) -> None:
    manifests = plan("job", queue=queue, topology=topology).manifests
    kinds = ["Secret", "ServiceAccount", "Role", "RoleBinding", "Service", "Job", "Job"]
    assert [manifest["kind"] for manifest in manifests] == kinds
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    role, hosts, launcher = manifests[2], manifests[5], manifests[6]
    assert role["rules"] == [
        {"apiGroups": ["batch"], "resources": ["jobs"], "resourceNames": ["train-hosts"], "verbs": ["patch"]}
    ]
    assert launcher["spec"]["template"]["spec"]["serviceAccountName"] == "train"
    assert "serviceAccountName" not in hosts["spec"]["template"]["spec"], "pods with ranks need no rights"
    assert ("kueue.x-k8s.io/elastic-job" in hosts["metadata"].get("annotations", {})) == bool(queue)
    template = hosts["spec"]["template"]
    near = template["metadata"].get("annotations", {})
    assert ("affinity" in template["spec"]) == (bool(topology) and not queue)
    if queue and topology.endswith(":2"):
        slice_of = "kueue.x-k8s.io/podset-slice-"
        assert near == {f"{slice_of}required-topology": "kubernetes.io/hostname", f"{slice_of}size": "2"}
    elif queue and topology:
        assert near == {"kueue.x-k8s.io/podset-preferred-topology": topology}


def test_a_jobset_that_grows_has_a_role_for_it() -> None:
    manifests = plan("jobset", policy="gain:0.7").manifests
    assert [one["kind"] for one in manifests] == ["Secret", "ServiceAccount", "Role", "RoleBinding", "JobSet"]
    assert manifests[2]["rules"][0]["apiGroups"] == ["jobset.x-k8s.io"]
    whole = manifests[-1]
    assert kubeflow.JobsetV1alpha2JobSet.from_dict(whole).to_dict() == whole
    (command,) = [
        one["command"]
        for one in whole["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    ]
    at = command.index("--autoscale")
    assert command[at : at + 4] == ["--autoscale", "gain:0.7", "--resize", "jobset/train"]


def test_an_account_that_is_named_needs_no_role() -> None:
    manifests = plan(service_account="trainer").manifests
    assert "Role" not in [one["kind"] for one in manifests]
    assert manifests[-1]["spec"]["template"]["spec"]["serviceAccountName"] == "trainer"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "jobset", "queue": "q"}, "Kueue lets only Jobs change their size. Use --kind job."),
        ({"topology": "a b"}, "--topology a b: give a label of nodes, such as topology.kubernetes.io/rack"),
        ({"topology": "rack:4"}, "only Kueue places groups of pods. Give a --queue, or leave out :4."),
        ({"topology": "rack:0", "queue": "q"}, "give a label of nodes"),
        ({"topology": "rack:3", "queue": "q"}, "--nodes 2 of 8 ranks are 16, but the job may have 24 to 48 ranks in"),
        ({"topology": "rack:9", "queue": "q"}, "--elastic 8:64 has no multiple of 72"),
    ],
)
def test_what_cannot_grow_is_refused_before_anything_is_submitted(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**fields)
    assert words in str(refused.value)


def test_pods_that_grow_by_hand_may_be_near_each_other_too() -> None:
    job = Job(("train.py",), nproc=8, elastic=Elastic(8, 64))
    *_, hosts, launcher = plan_k8s(job, PodRequest("image:1", nodes=2, name="train", topology="rack"), {}).manifests
    assert "affinity" in hosts["spec"]["template"]["spec"]
    assert "--topology" not in launcher["spec"]["template"]["spec"]["containers"][0]["command"]


def test_a_dry_run_says_what_the_launcher_will_do() -> None:
    first, second, *_ = plan(policy="gain:0.7").text().splitlines()
    assert first == "# autoscale gain:0.7: more ranks while each is at least 70% as fast as one rank alone"
    assert second.startswith("#   8 to 64 ranks in steps of 8; it begins with 16; more come from the API server")


# -- requests ---------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    server = Cluster(warm.python(), {**warm.RANKS_TOO, "OMP_NUM_THREADS": "1", "PAUSE_SECONDS": "0.05"})
    server.open_secure_door(tmp_path / "account")
    tell_of(server, tmp_path, monkeypatch)
    yield server
    server.close()


def made(cluster: Cluster, whole: K8sPlan) -> None:
    """Its objects, without anybody who follows them."""
    places = {"Role": "rbac.authorization.k8s.io/v1", "RoleBinding": "rbac.authorization.k8s.io/v1"}
    for manifest in whole.manifests:
        api = places.get(manifest["kind"], manifest["apiVersion"])
        path = f"/apis/{api}" if "/" in api else f"/api/{api}"
        cluster.make(f"{path}/namespaces/default/{manifest['kind'].lower()}s", manifest)


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_the_launcher_changes_its_pods_and_only_with_the_rights_that_it_has(
    cluster: Cluster, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # for what is outside of the cluster
    made(cluster, saying(plan(kind), "exec sleep 1000"))
    name = "train-hosts" if kind == "job" else "train-hosts-0"
    wait_until(lambda: len(cluster.pods(name)) == 2)
    place = ScaledPods(
        ApiServer.of_pod(cluster.account), Target.of("job/train-hosts" if kind == "job" else "jobset/train"), 8
    )
    place.ask(24, [pod.name for pod in cluster.pods(name)])
    wait_until(lambda: len(cluster.pods(name)) == 3)
    place.ask(8, [pod.name for pod in cluster.pods(name)])
    wait_until(lambda: [pod.index for pod in cluster.pods(name)] == [0])
    assert {pod.is_evicted for pod in cluster.jobs[name].pods if pod.phase == "Failed"} == {True}, "asked to leave"
    other = ScaledPods(ApiServer.of_pod(cluster.account), Target("job", "other"), 8)
    with pytest.raises(LaunchError, match=r"the API server refuses it: not found\. It was deleted\."):
        other.ask(8, ())
    role = next(path for path, one in cluster.objects.items() if one["kind"] == "Role")
    cluster.objects[role]["rules"][0]["resourceNames"] = ["another"]
    with pytest.raises(LaunchError, match=r"cannot patch this resource\. Its service account may not change it: give"):
        place.ask(16, ())
    cluster.is_down = True
    with pytest.raises(LaunchError, match="the server is starting"):
        place.ask(16, ())


def test_a_jobset_without_its_gate_says_what_is_needed(cluster: Cluster) -> None:
    made(cluster, saying(plan("jobset"), "exec sleep 1000"))
    cluster.has_elastic_jobsets = False
    with pytest.raises(
        LaunchError, match=r"field is immutable\. Of a JobSet, that needs .* ElasticJobsets: use --kind"
    ):
        ScaledPods(ApiServer.of_pod(cluster.account), Target.of("jobset/train"), 8).ask(24, ())


def test_a_server_that_nobody_vouches_for_is_not_spoken_to(cluster: Cluster, tmp_path: Path) -> None:
    stranger = Cluster()
    stranger.open_secure_door(tmp_path / "stranger")
    mixed = {**stranger.account, "SHARDWISE_SERVICE_ACCOUNT": cluster.account["SHARDWISE_SERVICE_ACCOUNT"]}
    try:
        with pytest.raises(LaunchError, match="certificate verify failed"):
            ScaledPods(ApiServer.of_pod(mixed), Target("job", "train-hosts"), 8).ask(8, ())
    finally:
        stranger.close()


def test_what_is_no_pod_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="KUBERNETES_SERVICE_HOST is not set"):
        ApiServer.of_pod({})
    with pytest.raises(ConfigError, match="the pod has no token to change its Job with"):
        ApiServer.of_pod({"KUBERNETES_SERVICE_HOST": "::1", "SHARDWISE_SERVICE_ACCOUNT": str(tmp_path / "no")})
    for text in ("job", "pod/x", "job/", "job/A"):
        with pytest.raises(ConfigError, match="name what makes the pods: job/NAME, or jobset/NAME"):
            Target.of(text)


def test_no_more_pods_leave_than_are_to_leave_where_some_with_low_indexes_are_away() -> None:
    pods = [f"train-hosts-{index}-x{index}yz" for index in (0, 3, 6, 7)]
    assert completions_for(9, pods) == 9
    assert completions_for(5, pods) == 8, "one that has not come is asked for no longer"
    assert completions_for(3, pods) == 7, "7 leaves"
    assert completions_for(1, pods) == 1
    assert completions_for(2, ["my-own-pod"]) == 2


# -- an admission trace -----------------------------------------------------------------------------------


TRACE = [(0.0, 2), (400.0, 6), (2500.0, 3), (4000.0, 8)]
"""Seconds, and how many pods are admitted from then on."""


@pytest.mark.parametrize(
    ("policy", "sizes"), [(Fill(), [16, 48, 24, 64]), (Gain(0.6), [16, 40, 24, 40])], ids=["fill", "gain"]
)
def test_a_recorded_admission_trace(cluster: Cluster, tmp_path: Path, policy: Any, sizes: list[int]) -> None:
    """Pods are admitted, preempted and admitted again while a launcher with a clock of the test asks for them. At 48
    ranks each is only 57 % as fast as one alone."""
    made(cluster, saying(plan(nproc=8), "exec sleep 1000"))
    cluster.admits = 2
    said: list[str] = []
    asking = AtOnce(ScaledPods(ApiServer.of_pod(cluster.account), Target.of("job/train-hosts"), 8), said.append)
    job = Scaling(policy, lambda _: Sizes(8, 64, 8), asking, said.append, lambda: MONDAY, wanted=16)
    speed = {size: 1 / (0.016 + 0.984 / size) for size in [1, *range(8, 65, 8)]}
    now, ends, ranks, since = 0.0, [], 0, 0.0
    for at, admitted in [*TRACE[1:], (6000.0, 0)]:
        while now < at:
            now += 5.0
            wanted = cluster.jobs["train-hosts"].spec["completions"]
            wait_until(lambda wanted=wanted: len(cluster.pods("train-hosts")) == min(wanted, cluster.admits or 0))
            pods = [pod.name for pod in cluster.pods("train-hosts")]
            if len(pods) * 8 != ranks:
                ranks, since = len(pods) * 8, now
            if now > since + 20:
                pace = Pace(ranks, 1 / speed[ranks], 0.001, {size: 1 / each for size, each in speed.items()})
                job.hear(MemberMessage("pace", 0, text=pace.to_text()), now)
            job.look(now, training(ranks, int(now)), pods, FolderNotes(None))
        ends.append(ranks)
        cluster.admits = admitted
    job.close()
    assert ends == sizes, said
    assert cluster.jobs["train-hosts"].spec["parallelism"] == cluster.jobs["train-hosts"].spec["completions"]
    assert not [line for line in said if "cannot be changed" in line]


def test_a_job_grows_by_itself_and_no_step_is_lost(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher in its pod asks for three pods, as its schedule says; losses are those of the plain model."""
    script = (survivor.__file__, str(tmp_path), "zero3", "engine", str(10**6))
    elastic = Elastic(1, 3, launcher_timeout_seconds=0, autoscale=parse_policy("schedule:00:00 3"))
    job = Job(script, nproc=1, port=free_port(2), grace_seconds=3, elastic=elastic)
    submitted = Submitted(cluster, plan_k8s(job, PodRequest("image:1", name="train"), {}), tmp_path)
    submitted.wait_for_ranks(3)
    (launcher,) = cluster.pods("train-launcher")
    assert submitted.end() == 0, cluster.log(launcher)
    losses_of(tmp_path, 3)
    assert "autoscale: 3 ranks instead of 1: the schedule has 3 from " in capsys.readouterr().out


@soak("two sizes are measured, of ranks that share two cores")
def test_a_job_fills_what_is_admitted_and_gives_back_what_does_not_pay(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what its ranks measure and tell the launcher, whatever that is on this machine."""
    script = (survivor.__file__, str(tmp_path), "zero3", "engine", str(10**6))
    elastic = Elastic(1, 2, launcher_timeout_seconds=0, autoscale=Fill())
    job = Job(script, nproc=1, port=free_port(2), grace_seconds=3, elastic=elastic)
    submitted = Submitted(cluster, plan_k8s(job, PodRequest("image:1", name="train"), {}), tmp_path)
    submitted.wait_for_ranks(2)
    time.sleep(30)
    (launcher,) = cluster.pods("train-launcher")
    assert submitted.end() == 0, cluster.log(launcher)
    said = capsys.readouterr().out
    assert "autoscale: 2 ranks instead of 1: 1 rank trains at " in said
    goes_back = "autoscale: 1 rank instead of 2: " in said
    assert goes_back == ("steps/s with 2 ranks is less than " in said)
    losses_of(tmp_path, 1 if goes_back else 2)
