"""Start scripts the way people do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

LAUNCH = [sys.executable, "-m", "shardwise", "launch"]


def launch(script: Path, num_ranks: int, *args: str, timeout_seconds: float = 90) -> subprocess.CompletedProcess[str]:
    """`shardwise launch` of `script`, to its end."""
    return subprocess.run(
        [*LAUNCH, "--nproc", str(num_ranks), str(script), *args],
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
