"""Ctrl-C in training, and while a checkpoint is being written: few words, nothing left, and another run continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
import warm
from shardwise.checkpoint import checkpoints_in
from shardwise.observe.run_view import read_run
from tests.free_port import free_port
from tests.patience import PATIENCE, wait_until
from tests.thorough import soak

SCRIPT = Path(__file__).with_name("interrupted.py")
INTERRUPTED = [(rank, point) for point in ("room", "file", "start", "note") for rank in (0, 1)]
INTERRUPTED += [(0, point) for point in ("wait", "index", "rename", "removal")]
"""The rank that interrupts all, and where."""
PASSED_ON = "shardwise: SIGINT: passed on to the ranks, which have 1000 s to end; a second signal kills them.\n"
"""The launcher's line when the first signal has come."""


@contextmanager
def started(folder: Path, when: str, num_ranks: int) -> Iterator[subprocess.Popen[str]]:
    """The script, alone or under a launcher of `num_ranks` ranks, once these are where Ctrl-C is to meet them."""
    launcher = ["-m", "shardwise", "launch", "--timeout", "1000", "--nproc", str(num_ranks)] if num_ranks else []
    temporary = folder / "temporary"
    temporary.mkdir()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    try:
        job = subprocess.Popen(
            [warm.python(), *launcher, str(SCRIPT), str(folder), when],
            env={**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        ready = [folder / f"ready-{rank}" for rank in range(num_ranks or 1)]
        wait_until(lambda: job.poll() is not None or all(one.exists() for one in ready), lambda: "no rank gets there")
        assert job.poll() is None, job.communicate()
        yield job
    finally:
        job.kill()
        job.communicate()


def left_behind(folder: Path) -> list[str]:
    """Processes, shared memory, and temporary files of the ranks. torch makes an empty folder for its compiler."""
    pids = [path.read_text() for path in folder.glob("ready-?")]
    shared = [path.name for path in Path("/dev/shm").iterdir() if any(pid in path.name for pid in pids)]
    files = [str(path) for path in (folder / "temporary").rglob("*") if path.is_file() or "shardwise" in path.name]
    return [*(pid for pid in pids if is_alive(pid)), *shared, *files]


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resumed_and_saved(folder: Path) -> int:
    """The step from which another run goes on; it saves there again, so drafts of the dead are gone."""
    model = nn.Linear(64, 64)
    with sw.shard(model, "ddp", optimizer=torch.optim.AdamW(model.parameters())) as engine:
        resumed = engine.resume(folder / "checkpoints")
        engine.save(folder / "checkpoints")
    assert not list((folder / "checkpoints").glob(".*"))
    return -1 if resumed is None else resumed.step


@pytest.mark.parametrize("when", ["training", "saving"])
@pytest.mark.parametrize("num_ranks", [2, 0], ids=["launched", "alone"])
def test_ctrl_c(when: str, num_ranks: int, tmp_path: Path) -> None:
    """A launcher says two lines. Alone it is Python that ends, as it always does: a traceback, and by the signal."""
    with started(tmp_path, when, num_ranks) as job:
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=PATIENCE)
    if num_ranks:
        assert err == f"{PASSED_ON}shardwise: ended by SIGINT; 2 of 2 ranks ended by themselves.\n"
        assert job.returncode == 130
    else:
        assert err.count("Traceback") == 1
        assert err.endswith("KeyboardInterrupt\n")
        assert job.returncode == -signal.SIGINT
    assert left_behind(tmp_path) == []
    assert list(checkpoints_in(tmp_path / "checkpoints")) == [1]
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))
    assert read_run(tmp_path / "run").status_text.endswith(": KeyboardInterrupt")
    assert resumed_and_saved(tmp_path) == 1


def test_ctrl_c_twice_kills_ranks_that_do_not_hear(tmp_path: Path) -> None:
    with started(tmp_path, "stubborn", 2) as job:
        job.send_signal(signal.SIGINT)
        assert job.stderr is not None
        assert job.stderr.readline() == PASSED_ON
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=PATIENCE)  # of the thousand that they would have had
    assert err == "shardwise: ended by SIGINT; 0 of 2 ranks ended by themselves, 2 had to be killed.\n"
    assert job.returncode == 130
    assert left_behind(tmp_path) == []
    assert resumed_and_saved(tmp_path) == 1


@soak("two processes are interrupted wherever the second one is at that moment")
@pytest.mark.parametrize(("rank", "point"), INTERRUPTED)
def test_ctrl_c_for_all_ranks_of_a_terminal(rank: int, point: str, tmp_path: Path) -> None:
    """Without a launcher, in one process group, to which a terminal sends it: each rank ends as Python does."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    jobs: list[subprocess.Popen[str]] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for number in range(2):
            job = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(tmp_path), f"{rank}:{point}"],
                env={**os.environ, **common, "RANK": str(number), "LOCAL_RANK": str(number)},
                stderr=subprocess.PIPE,
                text=True,
                process_group=jobs[0].pid if jobs else 0,
            )
            jobs.append(job)
        errors = [job.communicate(timeout=PATIENCE)[1] for job in jobs]
    finally:
        signal.signal(signal.SIGINT, before)
        for job in jobs:
            job.kill()
            job.communicate()
    assert [job.returncode for job in jobs] == [-signal.SIGINT] * 2, errors
    assert all(error.endswith("KeyboardInterrupt\n") for error in errors), errors
    assert not [path.name for path in (tmp_path / "checkpoints").glob(".*") if path.name != ".lock"]
    newest = 2 if point == "removal" else 1
    assert max(checkpoints_in(tmp_path / "checkpoints")) == newest
    assert resumed_and_saved(tmp_path) == newest
