"""Plans that are run for a few steps on this machine, to see which one is the fastest."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shardwise.cli import measured_rank
from shardwise.cli.console import waiting_for
from shardwise.errors import LaunchError
from shardwise.fit.search import Ranked
from shardwise.plan import Plan

TAIL = 800
"""Characters of what a failed run said."""


def measure(
    plans: Sequence[tuple[Ranked, Plan]], model: str, batch: str, optimizer: str, world_size: int
) -> list[tuple[Ranked, float]]:
    """Seconds of a step of each, the median of a few, on `world_size` processes of this machine. Those that cannot run
    here are left out. Raises `LaunchError` if none can, with what the last one said."""
    found, said = [], ""
    for ranked, plan in plans:
        with tempfile.TemporaryDirectory() as folder, waiting_for(f"steps of {ranked.candidate}"):
            task, out = Path(folder, "task.json"), Path(folder, "seconds.json")
            values = {
                "plan": plan.model_dump(mode="json", exclude_unset=True),
                "model": model,
                "batch": batch,
                "optimizer": optimizer,
                "rows": ranked.candidate.rows * ranked.candidate.accumulate,
                "out": str(out),
            }
            task.write_text(json.dumps(values), encoding="utf-8")
            command = [sys.executable, "-m", "shardwise", "launch", "--nproc", str(world_size)]
            command += [str(measured_rank.__file__), str(task)]
            ended = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
            if ended.returncode == 0 and out.exists():
                found.append((ranked, float(json.loads(out.read_text(encoding="utf-8")))))
            else:
                said = (ended.stderr or ended.stdout)[-TAIL:]
    if not found:
        raise LaunchError(f"None of the {len(plans)} best plans ran on this machine. The last one said: {said}")
    return found
