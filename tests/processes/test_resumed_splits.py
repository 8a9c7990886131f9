"""Models with dropout, split along `tp`, `pp` and products: a job that resumes goes on to the same bits."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from launching import launch

from tests.thorough import sampled

SCRIPT = Path(__file__).with_name("resume_rank.py")


@sampled
@pytest.mark.parametrize("mesh", ["tp=2", "pp=2", "dp=2,tp=2", "pp=2,tp=2", "tp=2,sp=2", "pp=2,dp=2"])
def test_a_resumed_job_goes_on_to_the_same_bits(mesh: str, tmp_path: Path) -> None:
    """Losses, norms and parameters. The resumed job has other values and other random numbers at its start."""
    num_ranks = math.prod(int(axis.partition("=")[2]) for axis in mesh.split(","))
    whole = launch(SCRIPT, num_ranks, str(tmp_path / "whole"), "4", mesh)
    assert whole.returncode == 0, whole.stderr
    lines = whole.stdout.splitlines()
    assert len(lines) == 4
    shutil.copytree(tmp_path / "whole" / "step-00000002", tmp_path / "parts" / "step-00000002")
    resumed = launch(SCRIPT, num_ranks, str(tmp_path / "parts"), "4", mesh)
    assert resumed.stdout.splitlines() == lines[2:], resumed.stderr
