"""`shardwise launch --where slurm` with Slurm's own daemons, on hosts that are namespaces of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import shardwise
from tests.cluster.slurm import Slurm, slurm_obstacle, slurm_on_two_nodes
from tests.cluster.training import TRAIN
from tests.patience import wait_until

pytestmark = [pytest.mark.skipif(bool(slurm_obstacle()), reason=slurm_obstacle()), pytest.mark.timeout(500)]

SAVES = """
    import os, sys, time
    from shardwise.launch import StopRequest
    rank, again = os.environ["SLURM_PROCID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    with StopRequest() as stop:
        print("rank", rank, "of", os.environ["SLURM_STEP_NUM_TASKS"], "begins", again, os.environ["SECRET"], flush=True)
        while again == "0" and not stop.requested:
            time.sleep(0.05)
        print("rank", rank, "saved" if stop.requested else "is done", flush=True)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_on_two_nodes(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def launch(slurm: Slurm, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | slurm.variables | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])} | variables
    command = [sys.executable, "-m", "shardwise", "launch", "--where", "slurm", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def wait_for(path: Path, *words: str, seconds: float = 200) -> str:
    def text() -> str:
        return path.read_text() if path.exists() else ""

    wait_until(lambda: all(word in text() for word in words), lambda: f"{words} are not in {text()!r}", seconds=seconds)
    return text()


def test_a_job_saves_before_its_time_is_over_and_begins_again(slurm: Slurm, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVES))
    # Slurm rounds up to 2 minutes, looks every half a minute, and sends a signal up to half a minute early
    options = ("--nodes", "2", "--nproc", "1", "--time", "1:30", "--save-before-end", "75", "--env", "SECRET")
    done = launch(slurm, tmp_path, *options, "train.py", SECRET="s3cr3t")
    assert done.returncode == 0, done.stderr
    number = done.stdout.partition("job ")[2].partition(";")[0]
    assert f"submitted as job {number}; `squeue -j {number}` shows it" in done.stdout
    log = tmp_path / f"train-{number}.log"
    wait_for(log, "rank 0 of 2 begins 0 s3cr3t", "rank 1 of 2 begins 0 s3cr3t")
    text = wait_for(log, "rank 0 saved", "rank 1 saved", "the job is requeued")
    assert "SIGTERM is sent to the ranks" in text
    text = wait_for(log, "rank 0 is done", "rank 1 is done")
    assert "rank 0 of 2 begins 1" in text
    assert text.count("SIGTERM is sent") == 1


def test_within_an_allocation(slurm: Slurm, tmp_path: Path) -> None:
    """`salloc` gives a shell with the variables of the allocation; the launcher starts a step in it."""
    tmp_path.chmod(0o755)
    (tmp_path / "fail.py").write_text(
        "import os, signal, sys\nif os.environ['SLURM_PROCID'] == '1': sys.exit(3)\nsignal.pause()"
    )
    (tmp_path / "show.py").write_text("import os; print(os.environ['SLURMD_NODENAME'], os.environ['SLURM_PROCID'])")
    shell = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--quiet", "sh", "-c"]
    launcher = f"{sys.executable} -m shardwise launch --where slurm --nproc 1"
    script = f"{launcher} --dry-run show.py; {launcher} show.py; echo status $?; {launcher} fail.py; echo status $?"
    environment = os.environ | slurm.variables | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    done = subprocess.run(
        [*shell, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["rank 0 on n1", "rank 1 on n2"], done.stdout + done.stderr
    assert {"n1 0", "n2 1", "status 0"} <= set(lines)
    assert lines[-1] in ("status 3", "status 143"), done.stderr  # the highest of the tasks, one of which Slurm ends
    assert "task 1: Exited with exit code 3" in done.stderr


def test_ranks_of_a_job_train_like_one_process(slurm: Slurm, tmp_path: Path) -> None:
    """`World.join()` finds its place by Slurm's variables, and the first host by its name."""
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    options = ("--nodes", "2", "--nproc", "1", "-x", "TOKEN", "--log-dir", "logs", "train.py")
    done = launch(slurm, tmp_path, *options, TOKEN="s3cr3t")
    assert done.returncode == 0, done.stderr
    number = done.stdout.partition("job ")[2].partition(";")[0]
    for rank, name in enumerate(("n1", "n2")):
        log = tmp_path / "logs" / f"train-{number}-rank-{rank}.log"
        wait_for(log, f"like the plain model on {name} as rank {rank}")


def test_ctrl_c_within_an_allocation(slurm: Slurm, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "train.py").write_text(textwrap.dedent(SAVES))
    launcher = [
        sys.executable,
        "-m",
        "shardwise",
        "launch",
        "--where",
        "slurm",
        "--nproc",
        "1",
        "-x",
        "SECRET",
        "train.py",
    ]
    environment = os.environ | slurm.variables | {"PYTHONPATH": str(Path(shardwise.__file__).parents[1]), "SECRET": "s"}
    with (tmp_path / "log").open("wb") as log:
        shell = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--quiet", *launcher]
        process = subprocess.Popen(shell, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        wait_for(tmp_path / "log", "rank 0 of 2 begins", "rank 1 of 2 begins")
        (started,) = psutil.Process(process.pid).children()
        started.send_signal(signal.SIGTERM)
        process.wait(60)
    wait_for(tmp_path / "log", "rank 0 saved", "rank 1 saved", seconds=1)


def test_what_slurm_refuses_is_told(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    done = launch(slurm, tmp_path, "--nproc", "1", "--launcher-args=--partition=absent", "train.py")
    assert done.returncode == 2
    assert "shardwise: Slurm refused the job: " in done.stderr
    assert "invalid partition" in done.stderr
