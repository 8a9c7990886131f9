"""Real processes: a run that is stopped and resumed is the run that was not, bit by bit, on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import launch

from tests.thorough import sampled

SCRIPT = Path(__file__).with_name("train_and_save.py")


@pytest.mark.parametrize("num_ranks", [1, 2])
@sampled
def test_stopped_and_resumed_is_the_same_run(num_ranks: int, tmp_path: Path) -> None:
    """Losses of every rank (dropout and noise draw from four generators), parameters, moments, learning rate."""
    whole = launch(SCRIPT, num_ranks, str(tmp_path / "whole"), "8")
    assert whole.returncode == 0, whole.stderr
    first = launch(SCRIPT, num_ranks, str(tmp_path / "parts"), "3")
    assert first.returncode == 0, first.stderr
    second = launch(SCRIPT, num_ranks, str(tmp_path / "parts"), "8", "--wait")
    assert second.returncode == 0, second.stderr
    resumed, *rest = second.stdout.splitlines()
    assert resumed == "resumed 3"
    assert first.stdout.splitlines() + rest == whole.stdout.splitlines()
    assert len(whole.stdout.splitlines()) == 8
