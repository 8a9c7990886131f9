"""Parameters sent in a narrower format: every rank computes with the same rounded values, and masters stay exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from twins import MakeOptimizer, Run, adamw, assert_as_near, assert_same, batches, plain_run, sharded_run
from wires import assert_trains_like, resuming, saving_to

import shardwise as sw
from shardwise.errors import PlacementError
from tests import inside
from tests.models import Transformer
from tests.thorough import sampled

CASES = [
    ("zero1", 2, None),
    ("zero2", 3, None),
    ("zero3", 2, None),
    ("zero3", 4, {"node": 2, "local": 2}),
    ("zero3-kept", 2, None),
    ("hsdp", 4, {"node": 2, "local": 2}),
    ("hpz", 4, {"node": 2, "local": 2}),
]
IDS = [f"{preset}-{num_ranks}{'x2' if mesh else ''}" for preset, num_ranks, mesh in CASES]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def rounded_run(model: Transformer, data: Any, make_optimizer: MakeOptimizer = adamw, *, shares: int = 1) -> Run:
    """The twin: the plain model computes in fp32 with parameters rounded to bf16, and updates exact ones. It takes
    batches in so many `shares`."""
    masters = copy.deepcopy(model)
    optimizer, run = make_optimizer(masters), Run()
    for batch in data:
        rounded = copy.deepcopy(masters)
        with torch.no_grad():
            for param in rounded.parameters():
                param.copy_(param.bfloat16())
        losses = [rounded(*share) / shares for share in zip(*(one.chunk(shares) for one in batch), strict=True)]
        loss = torch.stack(losses).sum()
        loss.backward()
        for param, computed in zip(masters.parameters(), rounded.parameters(), strict=True):
            param.grad = computed.grad
        run.norms.append(torch.nn.utils.clip_grad_norm_(masters.parameters(), float("inf")).item())
        optimizer.step()
        run.losses.append(loss.item())
    run.params = {name: param.detach().clone() for name, param in masters.named_parameters()}
    return run


@pytest.fixture(scope="module")
def twin(model: Transformer) -> Run:
    return rounded_run(model, batches(4, rows=12))


@pytest.fixture(scope="module")
def in_shares(model: Transformer) -> Run:
    """The same but for last bits, which round some elements to the other side."""
    return rounded_run(model, batches(4, rows=12), shares=2)


@sampled
@pytest.mark.parametrize("shares_memory", [True, False], ids=["shared", "sent"])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), CASES, ids=IDS)
def test_trains_like_a_plain_model_that_computes_with_rounded_parameters(
    preset: str, num_ranks: int, mesh: Any, model: Transformer, twin: Run, in_shares: Run, *, shares_memory: bool
) -> None:
    """And sends and holds what its program says."""

    data, wire = batches(4, rows=12), {"param": "bf16"}
    assert_trains_like(
        twin, model, data, preset, num_ranks, mesh, other=in_shares, shares_memory=shares_memory, wire=wire
    )


def test_the_rounding_shows(model: Transformer, twin: Run) -> None:
    """The twin differs from plain fp32 by more than the tolerance of the race."""
    exact = plain_run(model, batches(4, rows=12))
    with pytest.raises(AssertionError, match="the twin has"):
        assert_same(twin, exact)


def test_half_the_bytes_are_gathered(model: Transformer) -> None:
    def gathered(engine: sw.Engine) -> dict[str, Any]:
        planned = inside.program(engine)
        actions = [action for block in planned.micro_batch for action in block.actions]
        return {"bytes": sum(action.sent_bytes for action in actions if action.verb == "gather")}

    wide, narrow = (
        sharded_run(model, batches(1), "zero3", 2, None, after=gathered, **plan).extra["bytes"]
        for plan in ({}, {"wire": {"param": "bf16"}})
    )
    assert 2 * narrow == wide > 0


@pytest.mark.parametrize(
    ("preset", "plan", "why"),
    [
        ("ddp", {"wire": {"param": "bf16"}}, "with ddp every rank has and updates all parameters"),
        ("zero3", {"wire": {"param": "fp32"}}, "not narrower than parameters in fp32"),
        ("zero3", {"precision": "bf16", "wire": {"param": "bf16"}}, "not narrower than parameters in bf16"),
    ],
)
def test_refused(preset: str, plan: dict[str, Any], why: str, model: Transformer) -> None:
    with pytest.raises(PlacementError, match=why):
        sharded_run(model, batches(1), preset, 2, None, **plan)


@sampled
@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("zero3", {"activations": "recompute"}),
        ("zero3", {"resident_below": 100}),
        ("zero3-offload", {}),
        ("offload", {}),
        ("zero1", {"rules": {"norms": {"classes": ["LayerNorm"], "rows": {"param": {"shard": ["dp"]}}}}}),
    ],
    ids=["recomputed", "small-ones-whole", "states-on-host", "offload", "ruled"],
)
def test_with_other_settings(preset: str, plan: dict[str, Any], model: Transformer, twin: Run, in_shares: Run) -> None:
    run = sharded_run(model, batches(4, rows=12), preset, 2, None, wire={"param": "bf16"}, **plan)
    assert_as_near(run, twin, in_shares)


@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_resumes_exactly(preset: str, model: Transformer, twin: Run, in_shares: Run, tmp_path: Any) -> None:
    """A checkpoint has the exact values, and rounds like the run that wrote it, on another number of ranks too."""
    data = batches(4, rows=12)

    sharded_run(model, data[:2], preset, 2, None, after=saving_to(tmp_path), wire={"param": "bf16"})
    run = sharded_run(Transformer(), data[2:], preset, 3, None, step=resuming(tmp_path), wire={"param": "bf16"})
    run.losses[:0], run.norms[:0] = twin.losses[:2], twin.norms[:2]
    assert_as_near(run, twin, in_shares)
