"""NCCL itself, with the one rank that a single GPU allows: every collective, groups, an abort, and a second world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.launch.port import listen

pytestmark = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CHECKS = ("new_group", "can_split", "world", "train", "abort", "join again")


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, str]]:
    env = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with listen(None) as listener:
        env["MASTER_PORT"] = str(listener.getsockname()[1])
    script = Path(__file__).with_name("nccl_rank.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line for line in lines} | {"": {"error": run.stdout[-2000:] + run.stderr[-3000:]}}


@pytest.mark.parametrize("name", CHECKS)
def test_nccl(name: str, told: dict[str, dict[str, str]]) -> None:
    line = told.get(name, told[""])
    assert "result" in line, line.get("error")
    print(name, line["result"])
