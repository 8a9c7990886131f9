"""`shardwise plan --measure`: the best candidates run on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import warm
from tests.patience import PATIENCE
from tests.pure.test_plan_command import MODEL
from tests.thorough import thorough_only


@thorough_only("slow; smaller tests beside it cover the same code")
def test_the_best_is_run_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    words = ["--model", f"{tmp_path}/tiny.py:Model", "--batch", f"{tmp_path}/tiny.py:batch", "--hardware", "cpu"]
    words += ["--world", "2", "--axes", "none", "--most", "4", "--measure", "1", "--json"]
    ended = subprocess.run(
        [warm.python(), "-m", "shardwise", "plan", *words],
        env={**os.environ, **warm.RANKS_TOO},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    measured = found["measured"]
    assert [one["plan"] for one in measured] == [found["best"][0]["plan"]]
    assert measured[0]["seconds"] > 0
