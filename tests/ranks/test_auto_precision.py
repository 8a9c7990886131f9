"""`precision: auto`: all ranks compute in the same precision, and one that is slow at bf16 decides for all."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.optim.precision import auto_precision
from shardwise.testing import run_ranks
from tests.drawing import drawing

CPU = torch.device("cpu")
FAST, SLOW = 0.2, 45.0


def settled(precision: str, *ratios: float) -> list[str]:
    def rank(world: sw.World) -> str:
        plan = auto_precision.settle(sw.load_plan({"precision": precision}), world, CPU, lambda _: ratios[world.rank])
        assert plan.origin("precision") == ("auto" if precision == "auto" else "argument")
        return plan.precision

    return run_ranks(len(ratios), rank)


@pytest.mark.parametrize(
    ("ratios", "precision"),
    [
        ([FAST], "bf16"),
        ([SLOW], "fp32"),
        ([FAST, FAST, FAST], "bf16"),
        ([FAST, SLOW, FAST], "fp32"),
        ([SLOW, SLOW], "fp32"),
        ([FAST, float("inf")], "fp32"),
    ],
)
def test_auto_is_bf16_where_all_ranks_are_fast_at_it(ratios: list[float], precision: str) -> None:
    assert settled("auto", *ratios) == [precision] * len(ratios)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp64", "bf16"])
def test_a_precision_that_is_asked_for_stays(precision: str) -> None:
    assert settled(precision, SLOW, SLOW) == [precision] * 2


@pytest.mark.parametrize(("ratios", "warned"), [((FAST, FAST), False), ((FAST, SLOW), True), ((SLOW, SLOW), True)])
def test_bf16_on_a_slow_processor_is_one_warning(
    ratios: tuple[float, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    auto_precision._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        settled("bf16", *ratios)
        settled("bf16", *ratios)  # another engine of the same job
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warned
    assert all("takes 45 times as long as in fp32" in message and "\n" not in message for message in messages)


def test_an_accelerator_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> float:
        raise AssertionError("the processor was measured")

    monkeypatch.setattr(auto_precision, "bf16_ratio", measured)
    assert not auto_precision.is_slow(auto_precision.ratio_on(torch.device("xpu")))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert not auto_precision.is_slow(auto_precision.ratio_on(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert auto_precision.is_slow(auto_precision.ratio_on(torch.device("cuda")))


def test_the_ratio_is_measured_once_and_leaves_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    auto_precision.bf16_ratio.cache_clear()
    ratio = auto_precision.bf16_ratio()
    assert ratio > 0
    assert auto_precision.bf16_ratio() == ratio
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("ratio", "precision", "dtype"), [(SLOW, "fp32", torch.float32), (FAST, "bf16", torch.bfloat16)]
)
@pytest.mark.parametrize("deferred", [False, True])
def test_an_engine_and_a_changed_plan_compute_in_it(
    ratio: float, precision: str, dtype: torch.dtype, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_precision, "bf16_ratio", lambda: ratio)

    def rank(world: sw.World) -> None:
        with drawing(), sw.deferred_init() if deferred else contextlib.nullcontext():
            torch.manual_seed(0)
            model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = sw.shard(model, {"preset": "zero3", "precision": "auto"}, optimizer=optimizer, world=world)
        assert (engine.plan.precision, engine.table.compute) == (precision, precision)
        output = model(torch.ones(2, 4))
        assert output.dtype is dtype
        engine.backward(output.float().sum())
        engine.step()
        engine.reshard({"preset": "zero1", "precision": "auto"})
        assert engine.table.compute == precision
        engine.reshard({"preset": "zero1", "precision": "fp32"})
        assert engine.table.compute == "fp32"

    run_ranks(2, rank)


def test_a_plan_without_ranks_is_settled_by_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_precision, "ratio_on", lambda _: SLOW)
    assert auto_precision.settled_here(sw.load_plan({"precision": "auto"})).precision == "fp32"
    monkeypatch.setattr(auto_precision, "ratio_on", lambda _: FAST)
    assert auto_precision.settled_here(sw.load_plan({"precision": "auto"})).precision == "bf16"
    assert auto_precision.settled_here(sw.load_plan({"precision": "fp16"})).precision == "fp16"
