"""Training with sequences split over ranks is training with whole ones: every preset, beside data parallelism too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_devices import Devices
from sequences import Gpt, assert_same, batches, split_run, whole_run

from shardwise.placement import PRESETS

ONE_AXIS = sorted(name for name, preset in PRESETS.items() if len(preset.axes) == 1)
SPLIT = {"sp": 2}
BOTH = {"dp": 2, "sp": 2}


def gpt(**how: Any) -> Gpt:
    torch.manual_seed(0)
    return Gpt(**how)


@pytest.mark.parametrize(("mesh", "attention"), [(SPLIT, "ulysses"), (SPLIT, "ring"), (BOTH, "ring")])
@pytest.mark.parametrize("preset", ONE_AXIS)
def test_every_preset_trains_as_the_whole_model(preset: str, mesh: dict[str, int], attention: str) -> None:
    model, data = gpt(), batches(3)
    run = split_run(model, data, preset, mesh, sequence={"attention": attention})
    assert_same(run, whole_run(model, data))


@pytest.mark.parametrize("preset", ["hsdp", "hpz"])
def test_beside_two_data_axes(preset: str) -> None:
    model, data = gpt(), batches(2)
    run = split_run(model, data, preset, {"node": 2, "local": 2, "sp": 2})
    assert_same(run, whole_run(model, data))


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_by_messages_and_with_sp_outermost(attention: str) -> None:
    model, data = gpt(), batches(2)
    mesh, plan = {"sp": 2, "dp": 2}, {"attention": attention}
    run = split_run(model, data, "zero3", mesh, sequence=plan, shares_memory=False)
    assert_same(run, whole_run(model, data))


@pytest.mark.parametrize(
    ("preset", "attention", "reentrant"),
    [("zero1", "ring", False), ("zero2", "ulysses", False), ("zero3", "ring", True), ("zero3", "ulysses", True)],
)
def test_with_recomputing_accumulation_and_clipping(preset: str, attention: str, reentrant: bool) -> None:
    model, data = gpt(recomputes=True, reentrant=reentrant), batches(2, rows=8)
    run = split_run(model, data, preset, BOTH, sequence={"attention": attention}, accumulate=2, clip_grad_norm=0.5)
    twin = whole_run(model, data, accumulate=2, clip=0.5)
    assert min(twin.norms) > 0.5
    assert_same(run, twin)


def test_four_ranks_share_in_one_sequence() -> None:
    model, data = gpt(), batches(2, rows=1)
    for attention in ("ulysses", "ring"):
        run = split_run(model, data, "zero3", {"sp": 4}, sequence={"attention": attention})
        assert_same(run, whole_run(model, data))


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_on_devices(attention: str) -> None:
    model, data = gpt(), batches(2)
    run = split_run(model, data, "zero3", SPLIT, sequence={"attention": attention}, run=Devices("late").run)
    assert_same(run, whole_run(model, data))
