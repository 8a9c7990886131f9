"""A replacement imports what takes long before it joins the ranks that wait for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.comm.members import joining
from shardwise.comm.members.membership import StoreMembership
from shardwise.elastic.preparing import prepare
from tests.thorough import thorough_only

LOOP = """
import json, sys
import torch
import shardwise as sw

from shardwise.elastic.preparing import prepare

prepare()
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
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == []


def test_it_leaves_random_numbers_and_modes_as_they_were() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.no_grad():
        prepare()
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(("news", "expected"), [("4", ["prepared", "here"]), ("0", ["here"])])
def test_a_rank_that_comes_later_prepares_before_others_wait_for_it(
    news: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []

    class Entered(Exception):
        pass

    def enter(_: StoreMembership) -> None:
        did.append("here")
        raise Entered

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    environment = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "SHARDWISE_MEMBER": "4"},
        **{"SHARDWISE_FIRST_ANNOUNCEMENT": news, "RANK": "0", "WORLD_SIZE": "4"},
    }
    monkeypatch.setattr("shardwise.elastic.preparing.prepare", lambda: did.append("prepared"))
    monkeypatch.setattr(StoreMembership, "enter", enter)
    monkeypatch.setattr("atexit.register", lambda *_: None)
    with pytest.raises(Entered):
        joining.join_members(environment, lambda *_: pytest.fail("nobody opens a world"), 5, shares_memory=False)
    assert did == expected
