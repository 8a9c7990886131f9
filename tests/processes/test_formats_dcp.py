"""Checkpoints of FSDP2 on two processes: its shards are read, and what is written is read by its shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsdp2
import pytest
from launching import launch

import shardwise as sw
from shardwise.testing import run_ranks

SCRIPT = Path(fsdp2.__file__)


@pytest.mark.slow
def test_fsdp2_to_ours_and_back(tmp_path: Path) -> None:
    done = launch(SCRIPT, 2, str(tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads((tmp_path / "losses.json").read_text())
    assert said["again"] == said["losses"]
    models = [fsdp2.build() for _ in range(3)]

    def rank(world: sw.World) -> Any:
        model = models[world.rank]
        with sw.shard(model, "zero3", optimizer=fsdp2.adamw(model), world=world) as engine:
            assert engine.resume(tmp_path / "run") is not None
            whole = []
            for number in (3, 4):  # the same whole batch on every rank, so that three may share what two had
                loss = engine(fsdp2.batch(number, 0, 1))
                engine.backward(loss)
                engine.step()
                whole.append(loss.item())
            return whole

    assert run_ranks(3, rank)[0] == pytest.approx(said["losses"], rel=1e-5)
