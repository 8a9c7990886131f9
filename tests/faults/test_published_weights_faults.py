"""Weights in shared memory, between processes that are killed: readers keep the version before, and what is left
behind goes with the next version."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
import warm
from shardwise.comm import PostOffice, ThreadTransport
from tests.patience import PATIENCE
from tests.thorough import thorough_only

sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))

from launching import launch

SCRIPT = Path(__file__).with_name("dies_while_publishing.py")
MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="published-", dir=MEMORY if MEMORY.is_dir() else None))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("victim", [0, 1])
def test_killed_ranks_and_readers(victim: int, folder: Path) -> None:
    died = launch(SCRIPT, 2, str(folder), str(victim))
    assert died.returncode == 137, died.stderr
    if victim == 0:
        assert list(folder.glob(".writing-*")), "it was killed in the middle"
    read = subprocess.run([warm.python(), str(SCRIPT), str(folder), "read"], timeout=PATIENCE, check=False)
    assert read.returncode in (-9, 137)
    found = sw.published(folder, reader="mine")
    assert found is not None
    assert found.version == 1
    torch.manual_seed(0)
    as_published = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).state_dict()
    mapped = found.tensors()
    assert all(torch.equal(one, as_published[name]) for name, one in mapped.items())
    model = nn.Linear(8, 8)
    with sw.shard(model, "ddp", world=sw.World(0, 1, ThreadTransport(PostOffice(), 0))) as engine:
        for number in (2, 3, 4):
            engine.publish(folder, version=number, keep=1)
            assert not list(folder.glob(".writing-*"))
    newest = sw.published(folder, reader="mine")
    assert newest is not None
    newest.acknowledge("mine")
    assert {path.name for path in folder.glob("version-*")} == {"version-00000001", "version-00000004"}, (
        "the reader that was killed has never said that it is done"
    )
    sw.unpublish(folder)
    assert not list(folder.iterdir())
    assert all(torch.equal(one, as_published[name]) for name, one in mapped.items()), "they outlive their files"
