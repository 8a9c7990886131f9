"""Stages of a pipeline that do the same are rehearsed twice, and counted as if each had been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.fit import foreseen
from shardwise.fit.alike_stages import StageKinds
from shardwise.fit.foreseen import Counted, count_step
from shardwise.fit.stage_rehearsal import StageRehearsal
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from tests.models import Decoder
from tests.thorough import sampled

NUM_BLOCKS = 6
STAGES = [["tokens", "blocks.0", "blocks.1"], ["blocks.2"], ["blocks.3"], ["blocks.4"], ["blocks.5", "norm", "head"]]


class Uneven(Decoder):
    """Blocks get more from every third one on: nothing in the modules tells of it."""

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        for place, block in enumerate(self.blocks):
            hidden = block(hidden + hidden.sin() if place % 3 == 0 else hidden)
        return self.head(hidden)


class Remembers(Decoder):
    """Blocks read what the first one has returned, also on other stages."""

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        first = None
        for block in self.blocks:
            hidden = block(hidden if first is None else hidden + first)
            first = hidden if first is None else first
        return self.head(hidden)


def counted(
    model: nn.Module, values: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, *, of_few: bool, on_cpu: bool
) -> tuple[list[Counted], list[int]]:
    """What is counted, and the stages that were rehearsed for it."""
    stages: list[int] = []
    rehearse = StageRehearsal.rehearse

    def noted(self: StageRehearsal, stage: int, *args: Any) -> Any:
        stages.append(stage)
        return rehearse(self, stage, *args)

    plan = Plan(**values)
    mesh = Mesh(tuple(plan.mesh or ()), tuple((plan.mesh or {}).values()))
    batch = (torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long))
    with monkeypatch.context() as patch:
        patch.setattr(StageRehearsal, "rehearse", noted)
        if not of_few:
            patch.setattr(foreseen.StageKinds, "of", lambda *_: StageKinds())
        return count_step(model, batch, plan, mesh, counts_work=True, on_cpu=on_cpu), stages


def on_meta(build: type[Decoder], num_blocks: int = NUM_BLOCKS) -> nn.Module:
    with torch.device("meta"):
        return build(num_blocks=num_blocks)


CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"preset": "zero3", "mesh": {"pp": 5, "dp": 2}, "accumulate": 8},
    "zb-h1": {"mesh": {"pp": 5}, "accumulate": 10, "pipeline": {"schedule": "zb-h1"}},
    "interleaved": {"mesh": {"pp": 5}, "accumulate": 10, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
    "offload": {"mesh": {"pp": 5}, "accumulate": 8, "activations": {"policy": "offload"}},
    "tp": {
        "mesh": {"pp": 5, "dp": 1, "tp": 2},
        "accumulate": 8,
        "tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}},
    },
}


@sampled
@pytest.mark.parametrize("case", CASES)
def test_stages_that_do_the_same_are_rehearsed_twice(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is found is as if each had been rehearsed, to the byte, the operation and the name."""
    on_cpu, is_interleaved = case in ("zb-h1", "tp"), case == "interleaved"
    inner = [[f"blocks.{place}"] for place in range(2, 10)]
    stages = [["tokens", "blocks.0", "blocks.1"], *inner, ["blocks.10", "norm", "head"]] if is_interleaved else STAGES
    num_blocks = 11 if is_interleaved else NUM_BLOCKS
    values = {**CASES[case], "pipeline": {**CASES[case].get("pipeline", {}), "stages": stages}}
    few, rehearsed = counted(on_meta(Decoder, num_blocks), values, monkeypatch, of_few=True, on_cpu=on_cpu)
    every, all_stages = counted(on_meta(Decoder, num_blocks), values, monkeypatch, of_few=False, on_cpu=on_cpu)
    assert few == every
    assert all_stages == list(range(len(stages)))
    assert rehearsed == ([0, 1, 2, 4, 5, 9] if is_interleaved else [0, 1, 2, 4])


def test_stages_are_rehearsed_until_two_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second stage has one stand-in less before it than the others, which a peak shows."""
    inner = [[f"blocks.{place}"] for place in range(1, 5)]
    stages = [["tokens", "blocks.0"], *inner, ["blocks.5", "norm", "head"]]
    values = {"mesh": {"pp": 6}, "accumulate": 8, "pipeline": {"stages": stages}}
    few, rehearsed = counted(on_meta(Decoder), values, monkeypatch, of_few=True, on_cpu=False)
    every, _ = counted(on_meta(Decoder), values, monkeypatch, of_few=False, on_cpu=False)
    assert few == every
    assert rehearsed == [0, 1, 2, 3, 5]


@sampled
@pytest.mark.parametrize("build", [Uneven, Remembers])
def test_stages_that_do_other_things_are_each_rehearsed(build: type[Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though their modules are equal."""
    values = {"mesh": {"pp": 5}, "accumulate": 8, "pipeline": {"stages": STAGES}}
    few, rehearsed = counted(on_meta(build), values, monkeypatch, of_few=True, on_cpu=False)
    every, _ = counted(on_meta(build), values, monkeypatch, of_few=False, on_cpu=False)
    assert few == every
    assert set(rehearsed) == set(range(5))
