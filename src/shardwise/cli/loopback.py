"""Checks whether ranks can communicate on this machine: two processes add two numbers over loopback.

This is the parent, which needs no torch; each rank runs `loopback_rank.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NUM_RANKS = 2
RANK_PROGRAM = (sys.executable, "-m", "shardwise.cli.loopback_rank")
STARTED = "started-"
"""The prefix of the file that a rank creates when it has started and imported torch."""
_NOT_CONNECTED = "the two processes did not connect in time"


@dataclass(frozen=True)
class LoopbackResult:
    """The result: `trouble` is empty if the sum was right."""

    seconds: float
    trouble: str = ""
    is_late: bool = False
    """Whether the processes did not even start in time, which says nothing about the network."""


def run_loopback(timeout_seconds: float, program: Sequence[str] = RANK_PROGRAM) -> LoopbackResult:
    """Start both ranks, wait for both, and leave none running. Tests replace `program`."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-") as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(NUM_RANKS)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, output in enumerate(outputs):
                command = [*program, str(rank), folder, str(timeout_seconds)]
                with output.open("wb") as sink:
                    ranks.append(subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment()))
            trouble = _wait(ranks, outputs, started + timeout_seconds)
            num_started = sum((Path(folder) / f"{STARTED}{rank}").exists() for rank in range(NUM_RANKS))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if trouble == _NOT_CONNECTED and num_started < NUM_RANKS:
        return LoopbackResult(
            time.monotonic() - started, f"two processes did not start within {timeout_seconds:g} s", True
        )
    return LoopbackResult(time.monotonic() - started, trouble)


def _wait(ranks: list[subprocess.Popen[bytes]], outputs: list[Path], deadline: float) -> str:
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            break
        if time.monotonic() > deadline:
            return _NOT_CONNECTED
        time.sleep(0.02)
    for rank, process in enumerate(ranks):
        if process.poll():
            lines = outputs[rank].read_text(errors="replace").strip().splitlines()
            return f"rank {rank} ended with status {process.returncode}: {lines[-1] if lines else 'no output'}"
    return ""


def _environment() -> dict[str, str]:
    """The environment, in which children import this same package."""
    here = str(Path(__file__).resolve().parents[2])
    paths = [here, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
