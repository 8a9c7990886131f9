"""Models that are born, loaded and run in less memory than they take, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import warm
from tests.patience import PATIENCE
from tests.thorough import sampled

SCRIPT = Path(__file__).with_name("larger_than_memory.py")


@sampled
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("way", "tier"), [("built", "disk"), ("files", "disk"), ("files", "host")])
def test_deferred_init_and_generation_take_a_few_units(way: str, tier: str, tmp_path: Path) -> None:
    """On a disk under half of the model's size, with buffers and all; on the host what rests there, and a few units."""
    words = [warm.python(), str(SCRIPT), way, str(tmp_path), tier]
    run = subprocess.run(words, check=False, timeout=PATIENCE, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    model, born, used = map(float, run.stdout.split())
    resting = 0.0 if tier == "disk" else model
    assert born < resting + model / 3, "the largest unit, one tensor of its files, and histories"
    assert used < resting + model / 2, "also three units that are read, and two that are whole"
    if tier == "host":
        assert born > 0.9 * model, "so the measurement sees what it should"
