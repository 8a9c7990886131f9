"""Scripts of Horovod Elastic whose ranks die, leave and come: parameters are those of one process that never stopped.

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

SCRIPT = str(Path(__file__).with_name("horovod_elastic.py"))
STEPS = 30


def run(out: Path, options: list[str], *arguments: str) -> tuple[int, str]:
    """`shardwise horovodrun`, with exit status and what was said."""
    command = [warm.python(), "-m", "shardwise", "horovodrun", "-np", "4", *options, "python", SCRIPT, str(out)]
    environment = {**os.environ, **warm.RANKS_TOO, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    return done.returncode, done.stdout + done.stderr


def told(out: Path) -> dict[int, dict[str, Any]]:
    """What each member that came to the end has said, which then had the parameters of the plain run."""
    return {int(path.name[7:]): json.loads(path.read_text()) for path in out.glob("member-*")}


@pytest.mark.parametrize(
    ("samples", "faults", "left"),
    [
        ("plain", ["kill:1:5", "kill:0:15"], [2, 3]),  # rank 0 had the coordinator
        ("sampler", ["half:2:6"], [0, 1, 3]),
        ("sampler", ["kill:0:9", "kill:3:9"], [1, 2]),
        ("plain", ["commit:3:7"], [0, 1, 2]),
        ("sampler", ["mismatch:0:4", "mismatch:1:4", "mismatch:2:4", "mismatch:3:4"], [0, 1, 2, 3]),
    ],
)
def test_the_others_go_on(tmp_path: Path, samples: str, faults: list[str], left: list[int]) -> None:
    options = ["--min-np", "2", "--max-np", "4", "--reset-limit", "0"]
    status, said = run(tmp_path, options, str(STEPS), "0", samples, *faults)
    assert status == 0, said
    found = told(tmp_path)
    assert sorted(found) == left, said
    assert all((one["size"], one["step"]) == (len(left), STEPS) for one in found.values())
    assert [one[0] for one in found[left[0]]["all"]] == left
    assert "Back to the last commit: " in said
    if len(left) < 4:
        assert "killed by SIGKILL" in said


@pytest.mark.parametrize("samples", ["plain", "sampler"])
def test_replacements_join(tmp_path: Path, samples: str) -> None:
    """Rank 0 among them; and what they begin with is what the others have."""
    status, said = run(tmp_path, ["--min-np", "1"], str(STEPS), "2", samples, "kill:0:5", "kill:2:5")
    assert status == 0, said
    found = told(tmp_path)
    assert set(found) == {1, 3, 4, 5}, said
    assert all(one["size"] == 4 for one in found.values())
    assert len({one["step"] for one in found.values()}) == 1
    assert found[1]["rank"] == 0
    assert found[1]["sizes"][0] == 2
    assert found[1]["resets"] >= 2
    assert "4 ranks continue" in said


def test_one_that_is_asked_to_end_leaves_after_its_commit(tmp_path: Path) -> None:
    status, said = run(tmp_path, ["--min-np", "2", "--reset-limit", "0"], str(STEPS), "0", "sampler", "leave:3:8")
    assert status == 0, said
    found = told(tmp_path)
    assert sorted(found) == [0, 1, 2], said
    assert all((one["size"], one["step"], one["resets"]) == (3, STEPS, 1) for one in found.values())
    assert "Back to the last commit" not in said
    assert "1 rank left on request. 3 ranks continue" in said


def test_too_few_are_left(tmp_path: Path) -> None:
    options = ["--min-np", "4", "--reset-limit", "0"]
    status, said = run(tmp_path, options, str(STEPS), "0", "plain", "kill:1:5")
    assert status != 0
    assert "3 ranks are left, and the job needs 4 (--elastic)." in said
