"""Rows by rule: some parameters are stored elsewhere or compute in another dtype; training equals the plain model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twins import assert_rounds_like_the_plain_model, assert_same, batches, plain_run, sharded_run

import shardwise as sw
from shardwise.errors import ConfigError
from tests.models import Transformer
from tests.thorough import sampled

pytestmark = sampled

WHOLE = {"param": {"shard": []}, "held": {"shard": []}}
COPIED = {kind: {"shard": []} for kind in ("param", "held", "grad", "optim")}
RULES: dict[str, dict[str, Any]] = {
    "small ones resident": {"resident_below": 200},
    "norms resident": {"rules": {"norms": {"classes": ["LayerNorm"], "rows": WHOLE}}},
    "biases replicated": {"rules": {"biases": {"params": ["*.bias"], "rows": COPIED}}},
    "the first rule counts": {
        "rules": {
            "first": {"params": ["blocks.0.*"], "rows": WHOLE},
            "all": {"max_numel": 5000, "rows": COPIED},
        },
        "resident_below": 10**6,
    },
    "late sums for the head": {
        "rules": {"head": {"params": ["head.*"], "rows": {"grad": {"shard": [], "partial": ["dp"]}}}}
    },
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("zero3", 4), ("zero2", 2), ("zero3-kept", 3)])
@pytest.mark.parametrize("name", RULES)
def test_rules_train_like_the_plain_model(name: str, preset: str, num_ranks: int, tied: bool) -> None:
    if tied and name == "late sums for the head":
        pytest.skip("a tied head is the embedding, which is the first of its names")
    torch.manual_seed(0)
    model = Transformer(tied=tied)
    data = batches(6, rows=12)
    run = sharded_run(model, data, preset, num_ranks, None, clip_grad_norm=0.5, **RULES[name])
    assert_same(run, plain_run(model, data, clip=0.5))


def test_what_is_resident_is_never_gathered_and_costs_what_is_promised() -> None:
    def look(engine: sw.Engine) -> dict[str, Any]:
        micro_batch = engine.program().split("before step")[0]
        words = [line.split() for line in micro_batch.splitlines()]
        return {"gathers": [one[1] for one in words if one[0] == "gather"], "report": engine.memory()}

    torch.manual_seed(0)
    run = sharded_run(Transformer(), batches(4), "zero3", 2, None, resident_below=200, after=look)
    assert any(name.startswith("blocks") for name in run.extra["gathers"])
    assert not [name for name in run.extra["gathers"] if name.endswith(":small")]
    report = run.extra["report"]
    counters = 4 * len(list(Transformer().parameters()))  # Adam's own step counters, which no plan counts
    assert 0 <= report.measured.pop("optim") - report.promised.pop("optim") <= counters
    assert report.measured == report.promised


class MixedNorm(nn.Module):
    """Computes in the dtype of its own parameters, whatever the input's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(self.weight.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight).to(x.dtype)


def test_a_rule_may_compute_in_another_dtype() -> None:
    model = Transformer()
    for block in model.blocks:
        block.norm1 = MixedNorm(32)
    data = batches(6)
    rules = {"norms": {"classes": ["MixedNorm"], "precision": "fp32"}}

    def dtypes(engine: sw.Engine) -> dict[str, Any]:
        return {name: param.dtype for name, param in engine.module.named_parameters()}

    run = sharded_run(model, data, "zero3", 2, None, precision="bf16", rules=rules, after=dtypes)
    assert run.extra["blocks.1.norm1.weight"] == torch.float32
    assert run.extra["blocks.1.norm2.weight"] == torch.bfloat16
    narrow: Any = {"dtype": torch.bfloat16, "keeps": (MixedNorm,)}
    assert_rounds_like_the_plain_model(run, model, data, num_ranks=2, **narrow)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"params": ["blocks.*.nrm1.weight"]}, "fits none of the model's parameters. No parameter is called"),
        ({"classes": ["LayrNorm"]}, "Did you mean 'LayerNorm'?"),
        ({"rows": {"param": {"shard": ["tp"]}}}, "Rule 'odd': row 'param' names mesh axis 'tp'"),
        ({"rows": {"optim": {"shard": []}}}, "every rank there would repeat the same update"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused_by_name(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.split("'")[0]) as raised:
        sw.shard(Transformer(), {"rules": {"odd": rule}})
    assert said in str(raised.value)
