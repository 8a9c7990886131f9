"""Scripts of DeepSpeed that generate while a config of stage 3 lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).with_name("deepspeed_generation.py")


def test_ranks_have_different_numbers_of_prompts(tmp_path: Path) -> None:
    """transformers' `generate` would go on until all ranks are done, and wait for a rank that has left."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "launch", "--as-deepspeed", "--nproc", "2", str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, timeout=100, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert len(second) == 3
    assert second[:1] == first
