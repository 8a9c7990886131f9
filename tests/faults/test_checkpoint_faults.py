"""Whatever happens while a checkpoint is written, the last good one stays, and the error says what it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import warm

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))

from launching import launch

from shardwise.checkpoint import checkpoints_in
from tests.patience import PATIENCE
from tests.thorough import thorough_only, varies

SCRIPT = Path(__file__).with_name("checkpoint_faults.py")
DIES = Path(__file__).with_name("dies_while_saving.py")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@thorough_only("slow; smaller tests beside it cover the same code")
@varies
def test_faults_of_one_process(tmp_path: Path) -> None:
    """See the scenarios; they share a process because importing torch takes longer than they do."""
    scenarios = ["killed", "full", "read_only", "two_jobs", "end_without_closing"]
    done = run(warm.python(), str(SCRIPT), str(tmp_path), *scenarios)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == scenarios


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """On a file system of 2.5 MiB in a mount namespace of its own; only where this user may make one."""
    mounted = f"mount -t tmpfs -o size=2500k tmpfs {tmp_path}"
    if run("unshare", "-rm", "sh", "-c", mounted).returncode:
        pytest.skip("mounting is not allowed here")
    command = f"{mounted} && {sys.executable} {SCRIPT} {tmp_path} really_full"
    done = run("unshare", "-rm", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    assert "really_full: refused twice" in done.stdout


def test_a_rank_that_dies_while_saving(tmp_path: Path) -> None:
    """Killed in the middle of its file, in the background: the job ends, and goes on from the one before."""
    folder = tmp_path / "checkpoints"
    died = launch(DIES, 2, str(folder), "die")
    assert died.returncode == 137, died.stderr
    assert "rank 1" in died.stderr
    assert list(checkpoints_in(folder)) == [1]
    after = launch(DIES, 2, str(folder))
    assert after.returncode == 0, after.stderr
    assert after.stdout == "resumed from 1\n"
    assert list(checkpoints_in(folder)) == [1, 2]
    assert not list(folder.glob(".*")), "the draft of the dead is still there"


def test_a_rank_that_waits_for_a_dead_ranks_file_raises(tmp_path: Path) -> None:
    """Not ended by force, after it has waited for a note that never comes."""
    died = launch(DIES, 2, str(tmp_path), "die-awaited")
    assert died.returncode == 137, died.stderr
    assert "rank 1 ended (killed?) before it had finished its file" in died.stderr
    assert "rank 0 then raised" in died.stderr
    assert "had to be killed" not in died.stderr
    assert list(checkpoints_in(tmp_path)) == [1]
    assert not list(tmp_path.glob(".writing-*"))
