"""What `shardwise launch` would run in each place; nothing is started, and no host is asked."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shardwise.cli.launch import add_arguments
from shardwise.cli.main import main
from shardwise.cli.remote import Remote
from shardwise.cli.several_hosts import Probe, probe
from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.cores import bindings
from shardwise.launch.hosts.host_messages import Inbox, outcome_as_message, outcome_from, packed
from shardwise.launch.hosts.problems import connection_problem, contradictions, joined
from shardwise.launch.job import Elastic, Job
from shardwise.launch.outcome import Outcome
from shardwise.launch.places.forwarding import forwarded
from shardwise.launch.places.hosts import Host, choose, expand, parse_host_file, parse_hosts, shares
from shardwise.launch.places.k8s import PodRequest, plan_k8s
from shardwise.launch.places.k8s_run import _Pod, _Submitted
from shardwise.launch.places.mpi import family_of, plan_mpi
from shardwise.launch.places.slurm import SlurmRequest, plan_sbatch, plan_srun, seconds_of
from shardwise.launch.places.slurm_hosts import plan_nodes
from shardwise.launch.places.ssh import SshSettings, plan_ssh

JOB = Job(("train.py", "--lr", "1"), nproc=2, python="/opt/python")


class TestHosts:
    def test_lists_and_files_of_all_peers(self) -> None:
        named = [Host("gpu1", 4), Host("gpu2", 2, user="me"), Host("gpu3")]
        assert parse_hosts("gpu1:4, me@gpu2:2,gpu3") == named
        text = "# ours\ngpu1 slots=4  # big\n\nme@gpu2:2\ngpu3\n"
        assert parse_host_file(text, "hosts") == named
        assert parse_hosts("[fe80::1]:2") == [Host("fe80::1", 2)]

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("a slots=two", "line 1: 'slots=two' is not understood"),
            ("a\nb slots=0", "line 2: a host needs at least one slot"),
            ("a:2\na slots=2", "a is named twice"),
            ("-oProxyCommand=evil", "is not a host"),
            ("me@-oProxyCommand=evil:2", "is not a host"),
            ("-me@a", "is not a host"),
            ("a;rm", "is not a host"),
            ("# nobody", "it lists no host"),
        ],
    )
    def test_what_is_no_host(self, text: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            parse_host_file(text, "hosts")

    def test_include_and_exclude_as_deepspeed_has_them(self) -> None:
        hosts = parse_hosts("a:4,b:4,c:4")
        assert choose(hosts, include="b@c:0,2") == [Host("b", 4), Host("c", 2, devices=(0, 2))]
        assert choose(hosts, exclude="a@b:0,1") == [Host("b", 2, devices=(2, 3)), Host("c", 4)]
        assert choose(hosts, exclude="a:0,1,2,3") == hosts[1:]
        assert choose(hosts) == hosts

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"include": "a", "exclude": "b"}, "cannot be combined"),
            ({"include": "aa"}, "names 'aa', which is not in the host list. Did you mean 'a'"),
            ({"include": "a:9"}, "a has slots 0 to 3"),
            ({"include": "a:x"}, "after the colon come slots"),
            ({"exclude": "a@b"}, "leaves no host"),
        ],
    )
    def test_what_cannot_be_chosen(self, options: dict[str, str], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            choose(parse_hosts("a:4,b:4"), **options)

    def test_ranks_are_consecutive(self) -> None:
        split = shares(parse_hosts("a:2,b:1,c:3"))
        assert [list(share.ranks) for share in split] == [[0, 1], [2], [3, 4, 5]]
        assert [share.num_ranks for share in shares(parse_hosts("a,b:4"), nproc=3)] == [3, 3]
        with pytest.raises(ConfigError, match="number of ranks on b is unknown"):
            shares(parse_hosts("a:2,b"))
        with pytest.raises(ConfigError, match="more than the 2 slots of a"):
            shares(parse_hosts("a:2"), nproc=3)

    def test_host_names_of_slurm(self) -> None:
        assert expand("gpu[007-009,12],login") == ["gpu007", "gpu008", "gpu009", "gpu12", "login"]
        assert expand("r[1-2]n[08-09]-ib") == ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]
        assert expand("") == []
        for wrong in ("gpu[1-", "gpu[a-b]"):
            with pytest.raises(ConfigError, match="The host list"):
                expand(wrong)


class TestForwarding:
    def test_by_name_value_and_beginning(self) -> None:
        env = {"NCCL_DEBUG": "INFO", "HOME": "/root", "MINE": "1", "MY_A": "2", "SHARDWISE_LAUNCHER_PID": "7"}
        assert forwarded(env) == {"NCCL_DEBUG": "INFO"}
        assert forwarded(env, ["MINE", "NEW=a=b"], ["MY_"]) == {
            "MINE": "1",
            "MY_A": "2",
            "NCCL_DEBUG": "INFO",
            "NEW": "a=b",
        }
        with pytest.raises(ConfigError, match="there is no such variable here"):
            forwarded(env, ["ABSENT"])
        with pytest.raises(ConfigError, match="is not a name of a variable"):
            forwarded(env, ["A B=1"])


class TestSsh:
    def test_a_plan_shows_who_runs_where_and_no_values(self) -> None:
        settings = SshSettings("/shared/run", port=2222, copies=True, python_path="/a b")
        plan = plan_ssh(JOB, shares(parse_hosts("a:2,me@b:1")), settings, {"HF_TOKEN": "secret"})
        text = plan.text()
        assert "ranks 0 to 1 on a:" in text
        assert "rank 2 on me@b:" in text
        assert "with the variables HF_TOKEN" in text
        assert "secret" not in text
        command = plan.connection(plan.shares[1])
        assert command[:2] == ["ssh", "-T"]
        assert {"BatchMode=yes", "ControlMaster=no"} <= set(command)
        assert command[-2] == "me@b"
        assert shlex.split(command[-1])[1:] == ["env", "PYTHONPATH=/a b", "/opt/python", "-m", "shardwise.launch.hosts"]
        assert plan.copy(plan.shares[1])[-2:] == ["./", "me@b:/shared/run/"]
        with pytest.raises(ConfigError, match="give an absolute path"):
            plan_ssh(JOB, plan.shares, SshSettings("here"), {})


class TestMpi:
    def test_both_families(self) -> None:
        split = shares(parse_hosts("a:2,b:2"))
        environment = {"HF_TOKEN": "secret"}
        opened = plan_mpi(JOB, split, "openmpi", environment, bind="cores")
        assert shlex.join(opened.command) == (
            "mpirun -np 4 --host a:2,b:2 --bind-to core -x HF_TOKEN -x OMP_NUM_THREADS "
            "-x SHARDWISE_STOPS_BY_USR1 /opt/python train.py --lr 1"
        )
        assert opened.environment == {"HF_TOKEN": "secret", "OMP_NUM_THREADS": "1", "SHARDWISE_STOPS_BY_USR1": "1"}
        assert "--bind-to numa" in shlex.join(plan_mpi(JOB, split, "openmpi", {}, bind="node").command)
        assert "-bind-to socket" in shlex.join(plan_mpi(JOB, split, "mpich", {}, bind="socket").command)
        pinned = shlex.join(plan_mpi(JOB, split, "intel", {}, bind="node").command)
        assert "-genv I_MPI_PIN 1 -genv I_MPI_PIN_DOMAIN numa" in pinned
        hydra = plan_mpi(JOB, split, "mpich", {}, directory="/run", arguments=["-l"])
        assert shlex.join(hydra.command) == (
            "mpirun -np 4 -hosts a:2,b:2 -bind-to none -genvlist OMP_NUM_THREADS -wdir /run -l "
            "/opt/python train.py --lr 1"
        )
        intel = plan_mpi(JOB, split, "intel", {})
        assert "-hosts a,b -ppn 2 -genv I_MPI_PIN 0" in shlex.join(intel.command)
        with pytest.raises(ConfigError, match="the same number of ranks"):
            plan_mpi(JOB, shares(parse_hosts("a:2,b:1")), "intel", {})

    def test_the_mpi_is_known_by_what_mpirun_says_of_itself(self) -> None:
        assert family_of("mpirun (Open MPI) 5.0.8\n") == "openmpi"
        assert family_of("mpirun (PRRTE) 3.0\n") == "openmpi"
        assert family_of("HYDRA build details:\n    Version: 4.3") == "mpich"
        assert family_of("Intel(R) MPI Library for Linux* OS, Version 2021.16") == "intel"
        with pytest.raises(LaunchError, match="it says 'fake 1'"):
            family_of("fake 1\n")


class TestSlurm:
    def test_the_script_is_one_that_bash_and_sbatch_take(self) -> None:
        request = SlurmRequest(nodes=2, name="my job", time="1:00:00", gpus_per_node=4, arguments=("--partition=gpu",))
        script = plan_sbatch(JOB, request, {"HF_TOKEN": "secret"}, "/a b", "logs").script
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        header = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
        assert script.startswith("#!/bin/bash\n#SBATCH ")
        assert "#SBATCH --nodes=2" in header
        assert "#SBATCH --ntasks-per-node=2" in header
        assert "#SBATCH --chdir='/a b'" in header
        assert "#SBATCH --signal=B:USR1@120" in header
        assert "#SBATCH --export=ALL,HF_TOKEN" in header
        assert "secret" not in script
        assert 'scontrol requeue "$SLURM_JOB_ID"' in script
        assert "--output=logs/%x-%j-rank-%t.log" in script
        assert "/opt/python train.py --lr 1 &" in script
        alone = plan_sbatch(JOB, SlurmRequest(requeue=False), {}, "/run").script
        assert "scontrol" not in alone
        assert "#SBATCH --no-requeue" in alone

    def test_a_step_of_an_allocation(self) -> None:
        plan = plan_srun(JOB, SlurmRequest(), {}, {"SLURM_JOB_NODELIST": "n[1-2]"})
        assert plan.text().splitlines()[:2] == ["ranks 0 to 1 on n1", "ranks 2 to 3 on n2"]
        assert plan.command[:4] == ("srun", "--nodes=2", "--ntasks=4", "--ntasks-per-node=2")

    @pytest.mark.parametrize(
        ("time", "seconds"), [("30", 1800), ("2:30", 150), ("1:00:00", 3600), ("1-12", 129600), ("1-0:1:2", 86462)]
    )
    def test_times(self, time: str, seconds: int) -> None:
        assert seconds_of(time) == seconds

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"time": "soon"}, "is not a time limit"),
            ({"time": "2"}, "is not less than --time 2"),
            ({"nodes": 0}, "at least one"),
            ({"arguments": ("x\n#SBATCH -n 9",)}, "is not an option of sbatch"),
            ({"name": "a\nrm"}, "is not a valid job name"),
        ],
    )
    def test_what_cannot_be_asked(self, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            plan_sbatch(JOB, SlurmRequest(**fields), {}, "/run")


class TestKubernetes:
    @pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
    def test_manifests_read_back(self, kind: str) -> None:
        request = PodRequest("image:1", nodes=2, kind=kind, name="train", gpus_per_node=8, queue="q")
        plan = plan_k8s(JOB, request, {"A": "b"})
        assert tuple(yaml.safe_load_all(plan.text())) == plan.manifests
        assert plan.manifests[-1]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
        assert "nvidia.com/gpu: '8'" in plan.text()

    def test_pods_find_the_first(self) -> None:
        service, job = plan_k8s(JOB, PodRequest("image", nodes=3, name="t"), {}).manifests
        pod = job["spec"]["template"]["spec"]
        assert service["metadata"]["name"] == pod["subdomain"] == "t"
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "t"}
        assert service["spec"]["clusterIP"] == "None"
        command = pod["containers"][0]["command"]
        assert command[:5] == [
            "torchrun",
            "--nnodes=3",
            "--nproc-per-node=2",
            "--node-rank=$(JOB_COMPLETION_INDEX)",
            "--master-addr=t-0.t",
        ]
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == 3
        (whole,) = plan_k8s(Job(("a.py",), 1, max_restarts=2), PodRequest("i", kind="jobset", name="t"), {}).manifests
        assert whole["spec"]["failurePolicy"] == {"maxRestarts": 2}
        assert "--master-addr=t-hosts-0-0.t" in yaml.safe_dump(whole)

    @pytest.mark.parametrize("kind", ["job", "jobset"])
    def test_an_elastic_job_has_a_launcher_without_ranks_and_a_token(self, kind: str) -> None:
        elastic = Elastic(2, 6, retries=5, launcher_timeout_seconds=45)
        run_by = ("shardwise.integrations.run", "--plan", "zero3")
        job = Job(("a.py", "$(HOME)"), 2, elastic=elastic, run_by=run_by, max_restarts=1)
        request = PodRequest("image:1", nodes=2, kind=kind, name="t", gpus_per_node=2)
        manifests = plan_k8s(job, request, {"A": "b"}).manifests
        secret = manifests[0]
        token = secret["stringData"]["token"]
        assert len(token) == 64
        assert yaml.safe_dump_all(manifests[1:]).count(token) == 0
        jobs = (
            {one["metadata"]["name"]: one["spec"] for one in manifests[2:]}
            if kind == "job"
            else {f"t-{one['name']}": one["template"]["spec"] for one in manifests[1]["spec"]["replicatedJobs"]}
        )
        containers = {name: spec["template"]["spec"]["containers"][0] for name, spec in jobs.items()}
        launcher, ranks = containers["t-launcher"], containers["t-hosts"]
        host = "t-launcher-0.t" if kind == "job" else "t-launcher-0-0.t"
        assert ranks["command"] == ["python", "-m", "shardwise.launch.hosts", "connect", f"{host}:29500"]
        assert (ranks["resources"]["limits"], launcher.get("resources")) == ({"nvidia.com/gpu": "2"}, None)
        words = launcher["command"]
        assert words[:4] == ["python", "-m", "shardwise", "launch"]
        assert words[-4:] == ["--shardwise", "zero3", "a.py", "$$(HOME)"]
        assert "--elastic 2:6" in " ".join(words)
        assert "--retries 5:600" in " ".join(words)
        assert "--max-restarts 1" in " ".join(words)
        assert "--launcher-timeout 45" in " ".join(words)
        # what the launcher does not know would end its pod at once
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        assert parser.parse_args(words[4:]).where == "pods"
        for container in containers.values():
            (named,) = [one for one in container["env"] if one["name"] == "SHARDWISE_TOKEN"]
            assert named["valueFrom"] == {"secretKeyRef": {"name": "t", "key": "token"}}
        assert jobs["t-hosts"]["completions"] == jobs["t-hosts"]["parallelism"] == 2

    def test_what_looks_like_a_variable_stays(self) -> None:
        job = Job(("a.py", "$(HOME)"), 1, run_by=("shardwise.integrations.run", "--plan", "zero3"))
        command = plan_k8s(job, PodRequest("i"), {}).manifests[1]["spec"]["template"]["spec"]["containers"][0][
            "command"
        ]
        assert command[-6:] == ["-m", "shardwise.integrations.run", "--plan", "zero3", "a.py", "$$(HOME)"]

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"image": ""}, "needs --image"),
            ({"name": "My_Job"}, "is not a valid Kubernetes name"),
            ({"claims": {"a": "data"}}, "must begin with a slash"),
            ({"kind": "trainjob", "secrets": ("s",)}, "from its runtime"),
        ],
    )
    def test_what_cannot_be_asked(self, fields: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            plan_k8s(JOB, PodRequest(**{"image": "i"} | fields), {})


class TestDevices:
    def test_one_device_each(self) -> None:
        assert bindings(2, {}, kind="cuda") == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
        assert bindings(2, {"CUDA_VISIBLE_DEVICES": "5,GPU-7"}, kind="cuda")[1] == {"CUDA_VISIBLE_DEVICES": "GPU-7"}
        with pytest.raises(ConfigError, match="shows 1 devices, fewer than ranks"):
            bindings(2, {"CUDA_VISIBLE_DEVICES": "5"}, kind="cuda")
        with pytest.raises(ConfigError, match="no variable is known"):
            bindings(1, {}, kind="tpu")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--where ssh", "needs hosts"),
        ("--hosts a:1 --hostfile f", "both name the hosts"),
        ("--hostfile absent", "cannot be read: No such file"),
        ("--nodes 2", "--nodes has no effect on this machine alone"),
        ("--nodes 0", "--nodes has no effect on this machine alone"),
        ("--ssh-port 0", "--ssh-port has no effect on this machine alone"),
        ("--where slurm --nodes 0", "--nodes is 0; give 1 or more"),
        ("--where k8s --image i --gpus-per-node -1", "--gpus-per-node is -1; give 0 or more"),
        ("--hosts=", "--hosts: it lists no host"),
        ("--profile 0:1", "give the first and the last step, from 1"),
        ("--where local --hosts a:1", "--hosts has no effect on this machine alone"),
        ("--hosts a:1 --image i", "--image has no effect with --where ssh; it is for k8s"),
        ("--hosts a:1,b:1 --nodes 3", "--nodes is 3, but 2 hosts are named. Name as many, or fewer nodes."),
        ("--where mpi --mpi mpich", "The number of ranks is unknown"),
        ('--hosts a:1 --launcher-args "\'"', "is not a command line"),
        ("--hosts a:1 --identity absent", "there is no such file"),
        (
            "--hosts a:2,b:1 --elastic 4:8",
            "4 ranks are needed, but the hosts have 3 slots. Name more of them, or lower MIN.",
        ),
        ("--hosts a:2 --host-discovery-script ./d --elastic 1:2", "Remove --hosts and --hostfile"),
        ("--host-discovery-script ./absent --elastic 1:2", "cannot be run: No such file or directory"),
        ("--hosts a:2 --host-timeout 5", "are for elastic jobs"),
        ("--hosts a:2 --elastic 1:2 --host-timeout 0", "--host-timeout is 0"),
        ("--where slurm --elastic 1:2", "works within an allocation"),
        ("--where mpi --nproc 2 --elastic 1:2", "does not work with --where mpi"),
        (
            "--where k8s --image i --elastic 4:8 --nodes 3",
            "4 ranks are needed, but 3 pods of 1 have 3 slots. Raise --nodes or --nproc, or lower MIN.",
        ),
        ("--where k8s --image i --kind trainjob --elastic 1:8", "Use --kind jobset"),
        ("--where k8s --image i --port 65535 --elastic 1:8", "give 65534 or less"),
        ("--where k8s --image i --host-timeout 5", "are for elastic jobs"),
        ("--where pods --nproc 2", "is for elastic jobs"),
        ("--where pods --nproc 2 --elastic 4:8", "--nproc 2 is not within --elastic 4:8"),
        ("--where pods --port 65535 --elastic 1:1 --master-addr 10.0.0.1", "give 65534 or less"),
        ("--where pods --nproc 2 --elastic 1:8 --hosts a:1", "--hosts has no effect with --where pods"),
        ("--cooldown 5 --elastic 1:2", "--cooldown has no effect on this machine alone"),
        ("--autoscale fill", "--autoscale is for elastic jobs. Add --elastic MIN:MAX"),
        ("--elastic 1:4 --autoscale fill", "needs hosts to grow to, and this machine alone has none"),
        ("--hosts a:4 --elastic 1:4 --autoscale gain:2", "more than 0 and at most 1"),
        (
            "--hosts a:4 --elastic 6:8 --autoscale gain:0.5",
            "6 ranks are needed, but the hosts have 4 slots. Name more of them, or lower MIN.",
        ),
        ("--hosts a:4 --elastic 1:4 --topology rack", "--topology has no effect with --where ssh"),
        ("--where pods --nproc 2 --elastic 2:8 --autoscale fill --master-addr 10.0.0.1", "--resize job/train-hosts"),
        ("--where pods --nproc 2 --elastic 2:8 --resize job/x --master-addr 10.0.0.1", "Add --autoscale fill"),
        (
            "--where pods --nproc 2 --elastic 2:8 --topology rack --master-addr 10.0.0.1",
            "--topology with --where pods is",
        ),
        ("--where k8s --image i --nproc 8 --elastic 1:7 --autoscale fill", "has no multiple of 8"),
        ("--where k8s --image i --topology rack", "--topology is for elastic jobs"),
        ("--where k8s --image i --elastic 1:8 --service-account me", "--service-account is for --autoscale"),
    ],
)
def test_the_command_line_refuses(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(["launch", *shlex.split(options), "--dry-run", "train.py"]) == 2
    assert words in capsys.readouterr().err


def test_what_a_job_that_grows_begins_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(options: str) -> list[str]:
        assert main(["launch", *shlex.split(options), "--dry-run", __file__]) == 0
        return capsys.readouterr().out.splitlines()

    hosts = "--hosts a:4,b:4 --elastic 2:8"
    assert [line for line in shown(f"{hosts} --autoscale gain:0.7") if " on a" in line or " on b" in line] == [
        "ranks 0 to 1 on a:"
    ]
    assert "ranks 4 to 7 on b:" in shown(f"{hosts} --autoscale fill")
    first, second, *_ = shown(f"{hosts} --autoscale 'schedule:00:00 6'")
    assert first.startswith("autoscale schedule:mon 00:00 6; tue 00:00 6; ")
    assert second == "  2 to 8 ranks; it begins with 6; more come from the list of hosts"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-3]")
    shown_in_slurm = shown("--where slurm --nproc 2 --elastic 2:16 --autoscale gain:0.7")
    assert shown_in_slurm[1].startswith(
        "  2 to 16 ranks in steps of 2; it begins with 2; more come from further jobs of"
    )
    assert "ranks 0 to 1 on n1:" in shown_in_slurm


def test_an_allocation_of_slurm_has_a_step_for_each_node() -> None:
    job = Job(("train.py",), 2, elastic=Elastic(2, 4))
    env = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    plan = plan_nodes(job, {}, env, SshSettings("/work", address="n1"))
    assert [share.in_words() for share in plan.shares] == ["ranks 0 to 1 on n1", "ranks 2 to 3 on n2"]
    command = plan.connection(plan.shares[1])
    assert command[0] == "srun"
    assert {"--nodes=1", "--ntasks=1", "--nodelist=n2", "--overlap", "--chdir=/work"} <= set(command)
    assert command[-4:] == [job.python, "-m", "shardwise.launch.hosts", "members"]
    more = replace(plan, job_of={"n1": "", "n2": "12"}.__getitem__)
    assert "--jobid=12" in more.connection(more.shares[1])
    assert more.connection(more.shares[0]) == plan.connection(plan.shares[0])
    with pytest.raises(ConfigError, match="under `salloc --no-kill`"):
        plan_nodes(job, {}, {}, SshSettings("/work"))
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST is not"):
        plan_nodes(job, {}, {"SLURM_JOB_ID": "7"}, SshSettings("/work"))


def test_dry_runs_contact_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No tool of any place is found, and no script; the command line's options come out in the plans."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    told = {}
    for name, options in {
        "ssh": "--hostfile hosts --exclude b:0 --env A=1",
        "mpi": "--where mpi --mpi openmpi --hosts a:2 --python /opt/python",
        "slurm": "--where slurm --nodes 2 --nproc 4 --name big --launcher-args=--qos=high",
        "k8s": "--where k8s --image i --nodes 2 --env A=1 --claim data:/data --secret s",
    }.items():
        assert main(["launch", *options.split(), "--dry-run", "My_train.py", "--lr", "1"]) == 0
        told[name] = capsys.readouterr().out
    assert "rank 2 on b, devices 1:" in told["ssh"]
    assert "/opt/python My_train.py --lr 1" in told["mpi"]
    assert "#SBATCH --qos=high" in told["slurm"]
    assert "#SBATCH --job-name=big" in told["slurm"]
    job = list(yaml.safe_load_all(told["k8s"]))[1]
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert job["metadata"]["name"] == "my-train"
    assert {"name": "A", "value": "1"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "s"}}]
    assert "NCCL" not in json.dumps(container["env"])


class TestConnections:
    @pytest.mark.parametrize(
        ("status", "said", "words"),
        [
            (255, "ssh: Could not resolve hostname gpu9: Name or service not known", "its name is not known"),
            (255, "ssh: connect to host a port 22: Connection refused", "nothing answers at its ssh port"),
            (255, "ssh: connect to host a port 22: Connection timed out", "it does not answer"),
            (255, "ssh: connect to host a port 22: No route to host", "there is no route"),
            (255, "Host key verification failed.", "its host key is not the one that is known"),
            (255, "me@a: Permission denied (publickey).", "it refuses the key"),
            (255, "something new.", "ssh failed: something new"),
            (127, "sh: 1: exec: /opt/python: not found", "there is no /opt/python"),
            (1, "/opt/python: No module named shardwise", "has no shardwise of this version there"),
            (1, "Traceback\nMemoryError", "ended with status 1: MemoryError"),
            (None, "", "its shell started and did not answer"),
        ],
    )
    def test_why_a_host_did_not_answer(self, status: int | None, said: str, words: str) -> None:
        assert words in str(connection_problem(status, said, "/opt/python"))

    def test_launcher_and_doctor_word_a_failure_of_ssh_alike_with_their_own_options(self) -> None:
        def shell(host: str, said: str) -> Probe:
            return probe(host, Remote(("sh", "-c", f"echo {said!r} >&2; exit 255")), [])

        for said in ("me@a: Permission denied (publickey).", "connect to host a port 22: Connection refused"):
            launcher, doctor = connection_problem(255, said, "python"), shell("a", said)
            assert doctor.trouble == launcher.what
            assert "--ssh 'ssh -" in doctor.cure
            assert doctor.cure.partition("--")[0] == launcher.cure.partition("--")[0]
            assert {"--ssh-port", "--identity"} & set(launcher.cure.split())

    def test_versions_and_the_error_of_all_hosts(self) -> None:
        found = {
            "a": {"shardwise": "1", "torch": "2.13.0+cpu"},
            "b": {"shardwise": "1", "torch": "2.13.0+cu130"},
            "c": {"shardwise": "2", "torch": "2.13.0"},
            "d": {"shardwise": "1", "torch": "2.11.0"},
            "e": {"shardwise": "1", "torch": ""},
        }
        problems = contradictions(found, "1")
        assert list(problems) == ["c", "d", "e"]
        assert joined({"a": "it is off", "b": "no key?", "c": "it is off"}) == (
            "Nothing was started.\na, c: it is off.\nb: no key?"
        )
        assert joined({"a": "it is off"}) == "a: it is off. Nothing was started."

    def test_messages_among_what_a_shell_prints(self) -> None:
        reading, writing = os.pipe()
        inbox = Inbox(reading)
        first, second = packed({"do": "reach", "address": "\n\x1e", "port": 1}), packed({"do": "bye"})
        os.write(writing, b"Welcome!\n" + first + second[:4])
        assert inbox.take(1) == [{"do": "reach", "address": "\n\x1e", "port": 1}]
        os.write(writing, second[4:] + b"\x1enot JSON\n\x1e[1]\n" + packed({"do": "dance"}))
        assert inbox.take(1) == [{"do": "bye"}]
        os.close(writing)
        assert inbox.take(1) == []
        assert inbox.closed
        os.close(reading)

    def test_outcomes_come_through_with_the_clock_set_right(self) -> None:
        outcome = Outcome(3, 1, signal.SIGTERM, 100.0, "E", "T", True, sent_at=101.0, at_fault=(1, 2))
        told = json.loads(json.dumps(outcome_as_message(outcome)))
        assert outcome_from(told, 10.0) == replace(outcome, time=90.0, sent_at=91.0)
        unsent = Outcome(3, 0, None, 100.0)
        assert outcome_from(json.loads(json.dumps(outcome_as_message(unsent))), 0.0) == unsent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hosts a:1", "There is no ssh on this machine. Install OpenSSH's client."),
        (
            "--hosts a:1 --rsync --chdir /there",
            "a: there is no rsync on this machine; install it, or remove --rsync",
        ),
        ("--where mpi --nproc 2", "This machine has no mpirun. Install an MPI"),
        ("--where mpi --nproc 2 --mpi mpich", "mpirun could not be started: No such file or directory."),
        ("--where slurm", "This machine has no sbatch. Run this on a login node of a Slurm cluster"),
    ],
)
def test_tools_that_are_absent(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, before anything starts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "train.py").touch()
    assert main(["launch", *shlex.split(options), "train.py"]) == 2
    assert words in capsys.readouterr().err


def test_what_would_be_sent_without_rsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").touch()
    assert main(["launch", "--hosts", "a:1", "--rsync", "--dry-run", "train.py"]) == 0
    assert "the files to send are unknown: this machine has no rsync" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            "echo 'sbatch: error: fetch_config: DNS SRV lookup failed' >&2\n"
            "echo 'sbatch: fatal: Could not establish a configuration source' >&2\nexit 1",
            "The Slurm controller cannot be reached from here (fetch_config: DNS SRV lookup failed; Could not "
            "establish a configuration source). Run this on a login node, or check SLURM_CONF and `scontrol ping`.",
        ),
        (
            "echo 'sbatch: error: invalid partition specified: absent' >&2\nexit 1",
            "Slurm refused the job: invalid partition specified: absent.",
        ),
        ("exit 1", "Slurm refused the job: it gave no reason."),
        ("exec sleep 60", "sbatch did not answer within 0.5 s. See with `scontrol ping` if the controller is up."),
    ],
)
def test_what_sbatch_says_is_one_sentence(
    script: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if "sleep" in script:
        monkeypatch.setattr("shardwise.launch.places.slurm._SUBMIT_SECONDS", 0.5)
    assert main(["launch", "--where", "slurm", "--nodes", "1", "--nproc", "1", str(tmp_path / "train.py")]) == 2
    assert capsys.readouterr().err == f"shardwise: {words}\n"


def test_a_pod_s_log_is_followed_on_though_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes refuses to give the lines since a moment that is yet to come."""
    asked: list[dict[str, Any]] = []
    submitted: Any = object.__new__(_Submitted)
    submitted._namespace = "default"
    submitted._core = SimpleNamespace(read_namespaced_pod_log=lambda *_, **given: asked.append(given) or [])
    pod = _Pod(last="2026-01-02T03:04:05.6")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    submitted._show_what_comes("train-0", pod)
    assert [given["since_seconds"] for given in asked] == [2]
