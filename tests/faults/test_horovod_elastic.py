"""Scripts of Horovod Elastic whose ranks die, leave and join: parameters equal those of one uninterrupted process.

The script is `horovod_elastic.py` beside this file.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import warm
from tests.patience import PATIENCE
from tests.thorough import sampled

SCRIPT = str(Path(__file__).with_name("horovod_elastic.py"))
STEPS = 30


def run(out: Path, options: list[str], *arguments: str) -> tuple[int, str]:
    """The exit status and the output of `shardwise horovodrun`."""
    command = [warm.python(), "-m", "shardwise", "horovodrun", "-np", "4", *options, "python", SCRIPT, str(out)]
    environment = {**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    return done.returncode, done.stdout + done.stderr


def facts_of_members(out: Path) -> dict[int, dict[str, Any]]:
    """The facts that members wrote at the end, after comparing their parameters with the plain run's."""
    return {int(path.name[7:]): json.loads(path.read_text()) for path in out.glob("member-*")}


@sampled
@pytest.mark.parametrize(
    ("samples", "faults", "survivors"),
    [
        ("plain", ["kill:1:5", "kill:0:15"], [2, 3]),  # rank 0 had the coordinator
        ("sampler", ["half:2:6"], [0, 1, 3]),
        ("sampler", ["kill:0:9", "kill:3:9"], [1, 2]),
        ("plain", ["commit:3:7"], [0, 1, 2]),
        ("sampler", ["mismatch:0:4", "mismatch:1:4", "mismatch:2:4", "mismatch:3:4"], [0, 1, 2, 3]),
    ],
)
def test_surviving_ranks_continue(tmp_path: Path, samples: str, faults: list[str], survivors: list[int]) -> None:
    options = ["--min-np", "2", "--max-np", "4", "--reset-limit", "0"]
    status, output = run(tmp_path, options, str(STEPS), "0", samples, *faults)
    assert status == 0, output
    found = facts_of_members(tmp_path)
    assert sorted(found) == survivors, output
    assert all((one["size"], one["step"]) == (len(survivors), STEPS) for one in found.values())
    assert [one[0] for one in found[survivors[0]]["all"]] == survivors
    assert "Back to the last commit: " in output
    if len(survivors) < 4:
        assert "killed by SIGKILL" in output


@sampled
@pytest.mark.parametrize("samples", ["plain", "sampler"])
def test_new_ranks_replace_dead_ones(tmp_path: Path, samples: str) -> None:
    """Rank 0 is one of the dead. New ranks begin with the others' state."""
    status, output = run(tmp_path, ["--min-np", "1"], str(STEPS), "2", samples, "kill:0:5", "kill:2:5")
    assert status == 0, output
    found = facts_of_members(tmp_path)
    assert set(found) == {1, 3, 4, 5}, output
    assert all(one["size"] == 4 for one in found.values())
    assert len({one["step"] for one in found.values()}) == 1
    assert found[1]["rank"] == 0
    assert found[1]["sizes"][0] == 2
    assert found[1]["resets"] >= 2
    assert "4 ranks continue" in output


def test_a_rank_that_gets_sigterm_leaves_at_a_commit(tmp_path: Path) -> None:
    status, output = run(tmp_path, ["--min-np", "2", "--reset-limit", "0"], str(STEPS), "0", "sampler", "leave:3:8")
    assert status == 0, output
    found = facts_of_members(tmp_path)
    assert sorted(found) == [0, 1, 2], output
    assert all((one["size"], one["step"], one["resets"]) == (3, STEPS, 1) for one in found.values())
    assert "Back to the last commit" not in output
    assert "1 rank left on request. 3 ranks continue" in output


def test_fewer_ranks_than_the_minimum_end_the_job(tmp_path: Path) -> None:
    options = ["--min-np", "4", "--reset-limit", "0"]
    status, output = run(tmp_path, options, str(STEPS), "0", "plain", "kill:1:5")
    assert status != 0
    assert "3 ranks are left, and the job needs 4 (--elastic)." in output
