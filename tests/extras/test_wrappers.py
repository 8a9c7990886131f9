"""Wrappers of others around a sharded model: each trains as it does without us, or is refused with a sentence."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.thorough import sampled

SCRIPT = Path(__file__).with_name("wrapped.py")
NAMES = ("ddp", "trainer", "accelerate", "lightning", "lightning-ddp")


def launched(wrapper: str, preset: str) -> dict[str, Any]:
    """What rank 0 tells of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "told.json"
        command = [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", str(SCRIPT), wrapper, preset, str(file)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        if not file.exists():
            return {"error": f"exit status {done.returncode}", "is_letter": False, "trace": done.stderr[-3000:]}
        return json.loads(file.read_text())


@functools.cache
def plain(wrapper: str) -> dict[str, Any]:
    told = launched(wrapper, "plain")
    assert "error" not in told, told.get("trace")
    return told["state"]


@pytest.mark.timeout(600)
@sampled
@pytest.mark.parametrize("preset", ["zero3", "zero1"])
@pytest.mark.parametrize("wrapper", NAMES)
def test_equal_or_refused_by_a_sentence(wrapper: str, preset: str) -> None:
    told = launched(wrapper, preset)
    if "error" in told:
        assert told["is_letter"], f"{told['error']}: {told['trace']}"
        assert len(told["text"]) > 40
        return
    for name, value in plain(wrapper).items():
        torch.testing.assert_close(
            torch.tensor(told["state"][name]), torch.tensor(value), rtol=1e-4, atol=1e-6, msg=name
        )
