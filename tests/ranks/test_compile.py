"""Compiled units: the numbers of the plain model, one whole graph per class of block, originals back at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from twins import Transformer, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.errors import ConfigError

BACKEND = "aot_eager"  # traces forward and backward as inductor does, and needs no C++ compiler


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at an input that is no leaf
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("zero2", 2)])
def test_compiled_units_train_like_the_plain_model(preset: str, num_ranks: int) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    model, data = Transformer(), batches(5, rows=12)

    def after(engine: sw.Engine) -> dict[str, Any]:
        return {"model": engine.module, "compiled": "forward" in engine.module.blocks[0].__dict__}

    run = sharded_run(model, data, preset, num_ranks, None, compile=BACKEND, after=after)
    assert_same(run, plain_run(model, data))
    assert run.extra["compiled"]
    assert "forward" not in run.extra["model"].blocks[0].__dict__  # closing the engine puts it back
    assert not counters["graph_break"]
    assert 1 <= counters["stats"]["unique_graphs"] <= 2  # the three blocks share one


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="compile is 'inductr'"):
        sw.shard(Transformer(), {"compile": "inductr"})
