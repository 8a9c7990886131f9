"""Elastic jobs that cannot lose a rank restart all ranks from the last checkpoint, automatically."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import warm
from tests.faults.survivor import model_for
from tests.faults.test_survival import oracle
from tests.patience import PATIENCE
from tests.thorough import sampled, thorough_only

SCRIPT = Path(__file__).with_name("restarting_rank.py")
NUM_STEPS, DIES_AT = 8, 5
PLANS: dict[str, dict[str, Any]] = {
    "several engines": {"preset": "zero1"},
    "checkpoint": {"preset": "zero3", "survive": "checkpoint"},
}
SAID = "If a rank is lost, this job restarts from its last checkpoint instead."


def num_ranks_of(plan: Mapping[str, Any]) -> int:
    return math.prod(plan.get("mesh", {"dp": 2}).values())


def launched(
    out: Path, plan: Mapping[str, Any], *options: str, num_engines: int = 1, where: str = "loop"
) -> subprocess.CompletedProcess[str]:
    num_ranks = num_ranks_of(plan)
    launch = ["launch", "--nproc", str(num_ranks), "--elastic", f"1:{num_ranks}", "--timeout", "5", *options]
    arguments = [str(out), json.dumps(plan), str(NUM_STEPS), "1", where, str(DIES_AT), str(num_engines)]
    return subprocess.run(
        [warm.python(), "-m", "shardwise", *launch, str(SCRIPT), *arguments],
        env={**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@sampled
@pytest.mark.parametrize("name", PLANS)
def test_all_start_again_from_the_last_checkpoint(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]
    ran = launched(tmp_path, plan, num_engines=2 if name == "several engines" else 1)
    assert ran.returncode == 0, ran.stderr
    assert "restart 1 of 3 within 600 s begins" in ran.stderr, ran.stderr
    assert "cause: node" in ran.stderr
    assert (SAID in ran.stderr) == (name != "checkpoint"), "said at the start, but where the plan asks for it"
    assert ("steps since then; each rank reads " in ran.stderr) == (name != "checkpoint"), "what that costs, too"
    check(tmp_path, plan, first=DIES_AT - 1)


def check(out: Path, plan: Mapping[str, Any], *, first: int) -> None:
    """`first` is the last step of which there is a checkpoint."""
    found = [json.loads(path.read_text()) for path in out.glob("rank-*.json")]
    assert len(found) == num_ranks_of(plan)
    losses = oracle(NUM_STEPS, model_for(json.dumps(plan)))
    for one in found:
        assert one["first"] == first
        for step, loss in one["losses"].items():
            assert loss == pytest.approx(losses[int(step)], rel=1e-5)
    assert not list(Path("/dev/shm").glob(f"*{os.getpid()}*"))


@thorough_only("test_lost_in_shard.py has every point, on threads")
@pytest.mark.parametrize("where", ["shard", "edit", "inference"])
def test_all_start_again_where_the_others_have_nothing_to_go_on_from(where: str, tmp_path: Path) -> None:
    """Without --max-restarts, and whatever all of them raise."""
    plan = {"preset": "zero3", "mesh": {"dp": 3}}
    ran = launched(tmp_path, plan, "--retries", "2", where=where)
    assert ran.returncode == 0, ran.stderr
    assert "within 600 s begins." in ran.stderr, ran.stderr
    assert "cause: code" not in ran.stderr, ran.stderr
    assert ("while ranks sharded their model; restart 1 of 2 within 600 s begins." in ran.stderr) == (where == "shard")
    check(tmp_path, plan, first=0 if where == "shard" else DIES_AT - 1)


@thorough_only("three processes that start, and a kill")
def test_a_rank_that_is_killed_inside_shard_ends_a_job_without_retries(tmp_path: Path) -> None:
    ran = launched(tmp_path, {"preset": "zero3"}, "--retries", "0", where="shard")
    assert ran.returncode == 137, ran.stderr
    assert "rank 1 of 2 failed first: it was killed by SIGKILL" in ran.stderr
    assert "begins" not in ran.stderr


def test_without_retries_it_ends_with_the_status_of_the_failed_rank(tmp_path: Path) -> None:
    ran = launched(tmp_path, PLANS["checkpoint"], "--retries", "0")
    assert ran.returncode == 137, ran.stderr
    assert "begins" not in ran.stderr
    assert "rank 1 of 2 failed first: it was killed by SIGKILL" in ran.stderr
