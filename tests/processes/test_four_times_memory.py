"""ZeRO-3 with parameters and states on a disk, on two real ranks: a model four times as large as what a rank is allowed
to hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE
from tests.thorough import thorough_only

SCRIPT = Path(__file__).with_name("four_times_memory.py")
NUMEL = 48 * 768**2
MODEL_BYTES = (2 + 12) * NUMEL
"""Parameters in bf16; masters and two moments in fp32."""
GATHERED_BYTES = 3 * 2 * 768**2
ADDRESSES = 2 * NUMEL - GATHERED_BYTES
"""The kernel counts as private memory also the addresses of parameters that are not gathered, behind all of which lies
one and the same page (`memory/releasable.py`): of all of the model's, but for a few units at a time."""

ALL_PRIVATE = {"OMP_NUM_THREADS": "1", "SHARDWISE_SHARED_MEMORY": "0"}
NO_GAPS = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""What is freed is the system's again at once: gaps of the heap would count as private memory."""


def run(preset: str, folder: Path, limit: int = 0) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "shardwise", "launch", "--nproc", "2", str(SCRIPT), preset, str(folder), str(limit)]
    return subprocess.run(
        words, env=os.environ | ALL_PRIVATE | NO_GAPS, check=False, timeout=PATIENCE, capture_output=True, text=True
    )


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr + done.stdout
    (line,) = (line for line in done.stdout.splitlines() if "told" in line)
    return line.partition("told")[2].split()


@thorough_only("six processes, and some gigabytes on a disk")
@pytest.mark.skipif(sys.platform != "linux", reason="limits private memory, and reads /proc")
def test_a_model_four_times_as_large_as_a_ranks_memory_trains(tmp_path: Path) -> None:
    allowed = MODEL_BYTES // 4 + ADDRESSES
    on_disk, *losses = told(run("infinity", tmp_path / "scratch", allowed))
    assert int(on_disk) >= MODEL_BYTES // 2
    assert told(run("zero3-offload", tmp_path))[1:] == losses
    # With the same limit, and nothing else changed. Torch, C++, oneDNN or the kernel says it, whoever is asked first.
    assert run("zero3-offload", tmp_path, allowed).returncode != 0
    assert not list((tmp_path / "scratch").iterdir())
