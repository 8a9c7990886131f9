"""Engines with different meshes, one after the other, on the same ranks."""

from __future__ import annotations

import copy
import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined import batches, rows_of, unsplit
from twins import adamw

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import Decoder
from tests.thorough import sampled, thorough_only

STAGES = {"mesh": {"pp": 2, "dp": 2}}
OTHERS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 4}},
    "hsdp": {"preset": "hsdp", "mesh": {"node": 2, "local": 2}},
    "pp": STAGES,
}


def test_an_engine_whose_log_cannot_be_closed_leaves_the_model_and_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def rank(world: sw.World) -> None:
        model = Decoder()
        optimizer = adamw(model)
        engine = sw.shard(model, {"preset": "zero3", "run": str(tmp_path)}, optimizer=optimizer, world=world)
        engine.log({"loss": 1.0})
        with pytest.raises(OSError, match="No space left"):
            engine.close()
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert not {"step", "state_dict"} & vars(optimizer).keys()

    monkeypatch.setattr("shardwise.observe.run_log.RunLog.close", fail)
    run_ranks(2, rank)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("name", OTHERS)
def test_an_engine_after_one_with_stages_trains_like_the_plain_model(name: str) -> None:
    """In the first engine, ranks of different stages gather different units. The second must not report a mismatch."""
    model, data = Decoder(), batches(2, rows=16)
    expected = unsplit(model, data)
    models = [[copy.deepcopy(model) for _ in range(2)] for _ in range(4)]

    def rank(world: sw.World) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
        told = []
        for mine, plan in zip(models[world.rank], (STAGES, OTHERS[name]), strict=True):
            full = {"preset": "zero3", "accumulate": 2, **plan}
            with sw.shard(mine, full, optimizer=adamw(mine), world=world) as engine:
                steps = [engine.train_step((rows_of(engine, x), rows_of(engine, y))) for x, y in data]
                told.append(([engine.mean(loss.item()) for loss in steps], engine.state_dict()))
        return told

    for told in run_ranks(4, rank):
        for losses, params in told:
            assert losses == pytest.approx(expected.losses, rel=1e-5)
            for key, value in expected.params.items():
                torch.testing.assert_close(params[key], value, rtol=1e-4, atol=1e-5, msg=key)
