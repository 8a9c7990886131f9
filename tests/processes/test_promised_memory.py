"""What a rehearsal promises, held against what a process of its own comes to hold."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.thorough import thorough_only

WITHOUT_GAPS = {"MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
"""See [Note: process memory] in `runtime/rehearsal/rehearse.py`."""


def told_by(way: str, name: str, precision: str) -> int:
    command = [sys.executable, str(Path(__file__).with_name("promised_memory_rank.py")), way, name, precision]
    run = subprocess.run(command, env={**os.environ, **WITHOUT_GAPS}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@thorough_only("four processes that import transformers")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads /proc, and sets glibc's malloc")
@pytest.mark.parametrize(("name", "precision"), [("whisper", "fp32"), ("mixtral", "bf16")])
def test_no_more_is_held_than_was_promised(name: str, precision: str) -> None:
    pytest.importorskip("transformers")
    promised, held = told_by("foresee", name, precision), told_by("measure", name, precision)
    assert held <= 1.05 * promised
