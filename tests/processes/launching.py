"""Runs scripts under `shardwise launch`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import warm
from tests.patience import PATIENCE


def launch(
    script: Path, num_ranks: int, *args: str, timeout_seconds: float = PATIENCE, by_forks: bool = True
) -> subprocess.CompletedProcess[str]:
    """`shardwise launch` of `script`, to its end; launcher and ranks are forks of a process that has imported torch.

    Not `by_forks` where it matters what the C library reads when a process starts, such as malloc's thresholds.
    """
    return subprocess.run(
        [
            warm.python() if by_forks else sys.executable,
            "-m",
            "shardwise",
            "launch",
            "--timeout",  # for ranks to end: beside other work, that may take long
            str(PATIENCE),
            "--nproc",
            str(num_ranks),
            str(script),
            *args,
        ],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, **(warm.RANKS_TOO if by_forks else {}), "OMP_NUM_THREADS": "1"},
        check=False,
    )


def told_by_ranks(script: Path, folder: Path, num_ranks: int, *args: str) -> list[Any]:
    """What each rank of `script` has written to `folder/RANK.json`; its first argument is the folder."""
    done = launch(script, num_ranks, str(folder), *args)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def end(launcher: subprocess.Popen[str]) -> None:
    """End an elastic job, if it has not ended: where a launcher is killed, another process takes over."""
    for _ in range(2):  # the second signal kills the ranks
        if launcher.poll() is None:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(timeout=2)
    launcher.kill()
    launcher.wait()
