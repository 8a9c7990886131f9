"""`shardwise launch --where slurm --elastic` in an allocation of Slurm's own daemons, one of whose nodes is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import shardwise
from tests.cluster.namespaces import processes_with
from tests.cluster.slurm import Slurm, slurm_obstacle, slurm_on_two_nodes
from tests.cluster.test_elastic_hosts import SCRIPT, Job, kill
from tests.cluster.test_launch_slurm import wait_for
from tests.patience import wait_until
from tests.thorough import soak

pytestmark = [pytest.mark.skipif(bool(slurm_obstacle()), reason=slurm_obstacle()), pytest.mark.timeout(500)]

BEGINS = """
    import time, torch, shardwise as sw
    from shardwise.launch import StopRequest
    model = torch.nn.Linear(4, 4)
    engine = sw.shard(model, "zero2", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    loaded = engine.resume("checkpoints")
    world, begun = engine.world, engine.num_steps
    print("rank", world.rank, "of", world.size, "begins after step", begun, flush=True)

    def take_a_step():
        engine.train_step(torch.ones(2, 4), torch.zeros(2, 4), loss_fn=torch.nn.functional.mse_loss)
        time.sleep(0.05)
"""
SAVES = f"""{BEGINS}
    with StopRequest() as stop:
        while not engine.any_rank(stop.requested) and not (loaded and engine.num_steps > begun + 2):
            take_a_step()
    if not loaded:
        engine.save("checkpoints")
    print("rank", world.rank, "is done" if loaded else f"saved step {{engine.num_steps}}", flush=True)
    engine.close()
"""
SAVES_ONCE = f"""{BEGINS}
    while not (loaded and engine.num_steps > begun + 2):
        take_a_step()
        if engine.num_steps == 10:
            engine.save("checkpoints")
            print("rank", world.rank, "saved", flush=True)
    print("rank", world.rank, "is done", flush=True)
    engine.close()
"""
AGAIN = """\
#!/bin/bash
#SBATCH --job-name=train --nodes=2 --ntasks-per-node=1 --no-kill --requeue
#SBATCH --output=train.log --open-mode=append
for attempt in 1 2 3; do
  {launch} --where slurm --nproc 1 --elastic 1:2 train.py
  status=$?
  [ $status -eq 137 ] || exit $status
  echo "the launcher was killed"
done
"""
BATCH = """\
#!/bin/bash
#SBATCH --job-name=train --nodes=2 --ntasks-per-node=1 --no-kill --requeue
#SBATCH --output=train.log --open-mode=append
#SBATCH --time={time} --signal={signal}@75
{launch} --where slurm --nproc 1 --elastic {limits} train.py &
trap 'trap "" TERM; kill -TERM $!; wait $!; scontrol requeue $SLURM_JOB_ID; exit 0' TERM
wait $!
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    (tmp_path / "run").mkdir()
    with slurm_on_two_nodes(tmp_path) as made:
        yield made


def submitted(slurm: Slurm, folder: Path, script: str = SAVES, batch: str = BATCH, *more: str, **settings: str) -> Path:
    """Submit the batch script, with `more` options again; returns its log."""
    folder.chmod(0o755)
    (folder / "train.py").write_text(textwrap.dedent(script))
    # Slurm rounds up to 3 minutes, looks every half a minute, and sends a signal up to half a minute early
    launch = f"{sys.executable} -m shardwise launch --master-addr {slurm.hosts.addresses['n1']} --timeout 20"
    (folder / "job.sh").write_text(batch.format(time="2:30", launch=launch, **settings))
    environment = os.environ | slurm.variables | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    environment["OMP_NUM_THREADS"] = "1"
    for options in ((), more) if more else ((),):
        command = ["sbatch", "--quiet", *options, "job.sh"]
        subprocess.run(command, cwd=folder, env=environment, timeout=60, check=True)
    return folder / "train.log"


def test_a_job_saves_before_its_time_is_over_and_goes_on_when_it_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    log = submitted(slurm, tmp_path / "run", signal="B:TERM", limits="1:2")
    wait_for(log, "rank 0 of 2 begins after step 0", "rank 1 of 2 begins after step 0")
    text = wait_for(log, "rank 0 saved step", "rank 1 saved step")
    assert "SIGTERM: passed on to the ranks, which have 20 s to end" in text
    step = text.partition("saved step ")[2].split()[0]
    wait_for(log, f"rank 0 of 2 begins after step {step}", "rank 0 is done", "rank 1 is done")


def test_a_signal_to_the_steps_ends_a_job_that_needs_all_its_nodes_and_it_saves(slurm: Slurm, tmp_path: Path) -> None:
    log = submitted(slurm, tmp_path / "run", signal="TERM", limits="2:2")
    wait_for(log, "rank 0 of 2 begins after step 0", "rank 1 of 2 begins after step 0")
    text = wait_for(log, "rank 0 saved step", "rank 1 saved step")
    assert "the job needs its ranks, so all ranks are told to end" in text


@soak("kills processes at any moment")
def test_a_launcher_that_is_killed_is_started_again_by_its_batch_script(slurm: Slurm, tmp_path: Path) -> None:
    """In the same allocation: nothing waits in the queue, and nothing of before is in the way."""
    log = submitted(slurm, tmp_path / "run", SAVES_ONCE, AGAIN)
    wait_for(log, "rank 0 saved", "rank 1 saved")
    number = slurm.command("squeue", "--noheader", "--format=%i")
    (launcher,) = processes_with("--elastic", tmp_path / "run")
    os.kill(launcher, signal.SIGKILL)
    text = wait_for(log, "the launcher was killed", "rank 0 is done", "rank 1 is done")
    assert "rank 0 of 2 begins after step 10" in text
    assert "rank 1 of 2 begins after step 10" in text
    assert f"JobId={number.strip()}" in slurm.command("scontrol", "show", "job", number.strip())
    wait_until(lambda: not processes_with("shardwise.launch", tmp_path / "run"), "something stays behind", 60)


@soak("a node is lost at any moment")
def test_the_node_of_a_batch_script_is_lost_and_a_job_that_depends_on_it_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """Slurm ends the job then, in spite of --no-kill, and does not put it into the queue, in spite of --requeue."""
    log = submitted(slurm, tmp_path / "run", SAVES_ONCE, AGAIN, "--dependency=afternotok:1")
    wait_for(log, "rank 0 saved", "rank 1 saved")
    slurm.command("scontrol", "update", "nodename=n1", "state=down", "reason=lost")  # it comes back by itself
    text = wait_for(log, "rank 0 is done", "rank 1 is done")
    assert "rank 0 of 2 begins after step 10" in text
    assert "rank 1 of 2 begins after step 10" in text
    assert "JobState=FAILED" in (told := slurm.command("scontrol", "show", "job", "1")), told
    assert "Requeue=1 Restarts=0" in told


@soak("kills processes at any moment")
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
        hosts.link("n1", "down")  # the launcher is not there, so that no node is special
        job.wait_for_members("n2")
        hosts.link("n1", "up")
        job.wait_for_members("n2", "n1")
        said = job.end()
    finally:
        job.process.kill()
        job.process.communicate()
    assert "rank 1 was killed by SIGKILL" in said
    assert "host n1 is gone: rank 0 (nothing was heard of it for 4 s)." in said
    assert "host n2 is gone: rank 1 (nothing was heard of it for 4 s)." in said
    assert "host n2 answers, with 1 slot." in said
    wait_until(lambda: not processes_with("shardwise.launch.hosts", folder), "what Slurm started stays behind", 60)


@soak("waits for jobs to be admitted")
def test_a_job_grows_by_nodes_of_further_jobs_and_gives_them_back(slurm: Slurm, tmp_path: Path) -> None:
    """It is in an allocation of one node; its schedule has two for some minutes, then one again."""
    folder, hosts = tmp_path / "run", slurm.hosts
    folder.chmod(0o755)
    now = datetime.now(UTC)
    times = f"{now - timedelta(minutes=1):%H:%M} 2; {now + timedelta(minutes=3):%H:%M} 1"
    options = ["--elastic", "1:2", "--master-addr", f"{hosts.network}.254", "--timeout", "3"]
    options += ["--autoscale", f"schedule:{times}"]
    launcher = [sys.executable, "-m", "shardwise", "launch", "--where", "slurm", "--nproc", "1", *options, str(SCRIPT)]
    environment = os.environ | slurm.variables | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    environment["OMP_NUM_THREADS"] = "1"
    pipe = subprocess.PIPE
    shell = ["salloc", "--no-kill", "--nodes=1", "--ntasks-per-node=1", "--quiet", *launcher]
    job = Job(folder, subprocess.Popen(shell, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        first = slurm.command("squeue", "--noheader", "--format=%i")
        job.wait_for_members("n1", "n2")
        assert slurm.command("squeue", "--noheader", "--format=%j").count("-more") == 1, first
        wait_until(lambda: "-more" not in slurm.command("squeue", "--noheader", "--format=%j"), "it stays", 240)
        job.wait_for_members("n1")
        said = job.end()
    finally:
        job.process.kill()
        job.process.communicate()
    assert "autoscale: 2 ranks instead of 1: the schedule has 2 from" in said
    assert "host n2 joins, with 1 slot." in said
    assert "host n2 is no longer in the list of hosts: 1 rank there leaves after its step." in said
