"""A replacement imports what takes long before it joins the ranks that wait for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.launch import worker
from shardwise.launch.warm_up import warm_up
from tests.patience import PATIENCE
from tests.thorough import thorough_only

LOOP = """
import json, sys
import torch
import shardwise as sw

from shardwise.launch.warm_up import warm_up

warm_up()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
before = set(sys.modules)
with sw.shard(model, "zero1", optimizer=optimizer) as engine:
    samples = torch.utils.data.TensorDataset(torch.randn(8, 4))
    for (x,) in sw.data.Loader(samples, batch_rows=4, world=engine.data_ranks, steps=2):
        engine.backward(model(x).sum())
        engine.step()
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_loop_imports_nothing_more_once_its_rank_has_joined(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == []


def test_it_leaves_random_numbers_and_modes_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.no_grad():
        warm_up()
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"SHARDWISE_MEMBER": "4", "SHARDWISE_FIRST_ANNOUNCEMENT": "4"}, ["warm", "script"]),
        ({"SHARDWISE_MEMBER": "0", "SHARDWISE_FIRST_ANNOUNCEMENT": "0"}, ["script"]),
        ({}, ["script"]),
    ],
)
def test_a_rank_that_comes_later_warms_up_before_others_wait_for_it(
    environment: dict[str, str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its script, in which it joins them, begins afterwards."""
    did: list[str] = []
    for name in ("SHARDWISE_MEMBER", "SHARDWISE_FIRST_ANNOUNCEMENT", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("skip_last_collection", "_die_with_launcher", "_bind_to_cores", "_write_whole_lines"):
        monkeypatch.setattr(worker, name, lambda: None)
    monkeypatch.setattr(worker, "run_script", lambda _: did.append("script"))
    monkeypatch.setattr("shardwise.launch.warm_up.warm_up", lambda: did.append("warm"))
    worker.main()
    assert did == expected
