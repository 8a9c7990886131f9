"""Tables between the presets, given by `rows` in a plan, train like the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twins import assert_rounds_like_the_plain_model, assert_same, batches, plain_run, sharded_run

from tests.models import Transformer
from tests.thorough import sampled

MESH = {"node": 2, "local": 2}
BOTH, LOCAL = {"shard": ["node", "local"]}, {"shard": ["local"]}
ROWS = {
    "ddp, states split": ("ddp", {"optim": BOTH}),
    "zero2, sums within a node kept by all": ("zero2", {"grad": LOCAL}),
    "hsdp, summed over nodes late": ("hsdp", {"grad": {"partial": ["node"]}}),
    "hsdp, late, states split": ("hsdp", {"grad": {"partial": ["node"]}, "optim": BOTH}),
    "hsdp, states split": ("hsdp", {"grad": BOTH, "optim": BOTH}),
    "zero3, held whole": ("zero3", {"held": {"shard": []}}),
    "zero2, held split": ("zero2", {"held": LOCAL}),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ROWS)
@sampled
def test_rows_between_the_presets_train_like_the_plain_model(name: str, precision: Any) -> None:
    model = Transformer()
    data = batches(6, rows=12)
    preset, rows = ROWS[name]
    run = sharded_run(model, data, preset, 4, MESH, precision=precision, rows=rows)
    if precision == "fp32":
        assert_same(run, plain_run(model, data))
    else:
        assert_rounds_like_the_plain_model(run, model, data, num_ranks=4, dtype=torch.bfloat16)
