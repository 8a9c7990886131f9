"""`shardwise plan --measure`: the best candidates run on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.pure.test_plan_command import MODEL


def test_the_best_is_run_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(MODEL)
    of_model = ["--model", f"{tmp_path}/tiny.py:Model", "--batch", f"{tmp_path}/tiny.py:batch"]
    words = [
        *of_model,
        "--world",
        "2",
        "--axes",
        "none",
        "--most",
        "4",
        "--hardware",
        "cpu",
        "--measure",
        "1",
        "--json",
    ]
    words += ["--measure", "1", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "shardwise", "plan", *words], capture_output=True, text=True, check=False, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    measured = found["measured"]
    assert [one["plan"] for one in measured] == [found["best"][0]["plan"]]
    assert measured[0]["seconds"] > 0
