"""`shardwise launch --where slurm --elastic` in an allocation of Slurm's own daemons, one of whose nodes is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwise
from tests.cluster.namespaces import cluster, processes_with, wait_until
from tests.cluster.slurm import Slurm, slurm_obstacle
from tests.cluster.test_elastic_hosts import SCRIPT, Job, kill

pytestmark = [pytest.mark.skipif(bool(slurm_obstacle()), reason=slurm_obstacle()), pytest.mark.timeout(300)]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    for name in ("keys", "slurm", "run"):
        (tmp_path / name).mkdir()
    with cluster(tmp_path / "keys") as hosts:
        for name in ("n1", "n2"):
            hosts.add(name, has_sshd=False)
        made = Slurm(hosts, ["n1", "n2"], tmp_path / "slurm")
        try:
            made.open()
            yield made
        finally:
            made.close()


def test_a_rank_and_a_node_are_lost_and_come_back(slurm: Slurm, tmp_path: Path) -> None:
    folder, hosts = tmp_path / "run", slurm.hosts
    folder.chmod(0o755)
    options = ["--elastic", "1:3", "--host-timeout", "4", "--master-addr", f"{hosts.network}.254", "--timeout", "3"]
    launcher = [sys.executable, "-m", "shardwise", "launch", "--where", "slurm", "--nproc", "1", *options, str(SCRIPT)]
    environment = os.environ | slurm.variables | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    environment["OMP_NUM_THREADS"] = "1"
    pipe = subprocess.PIPE
    shell = ["salloc", "--no-kill", "--nodes=2", "--ntasks-per-node=1", "--quiet", *launcher]
    job = Job(folder, subprocess.Popen(shell, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        job.wait_for_members("n1", "n2")
        kill("elastic_member", "\0SHARDWISE_MEMBER=1\0", "SLURM_JOB_ID")
        job.wait_for_loss(1)
        job.wait_for_members("n1", "n2")
        hosts.link("n2", "down")
        job.wait_for_members("n1")
        hosts.link("n2", "up")
        job.wait_for_members("n1", "n2")
        said = job.end()
    finally:
        job.process.kill()
        job.process.communicate()
    assert "rank 1 was killed by SIGKILL" in said
    assert "host n2 is gone: rank 1 (nothing was heard of it for 4 s)." in said
    assert "host n2 answers, with 1 slot." in said
    wait_until(lambda: not processes_with("shardwise.launch.hosts", folder), "what Slurm started stays behind", 60)
