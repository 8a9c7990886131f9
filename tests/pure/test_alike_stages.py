"""Stages of a pipeline that do the same are rehearsed twice, and counted as if each had been."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.fit import foreseen
from shardwise.fit.alike_stages import StageKinds
from shardwise.fit.few_blocks import FewBlocks
from shardwise.fit.foreseen import Counted, WithBlocks, parts_of
from shardwise.fit.stage_rehearsal import StageRecord, StageRehearsal
from shardwise.parallel.pipeline import WeightGrads
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from tests.models import Decoder, Stack
from tests.thorough import sampled, thorough_only

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
    model: nn.Module,
    values: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    *,
    of_few: bool,
    on_cpu: bool,
    with_blocks: WithBlocks | None = None,
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
        parts = parts_of(model, plan, mesh, on_cpu=on_cpu)
        return parts.of_stages(model, batch, counts_work=True, with_blocks=with_blocks), stages


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


class Between(Decoder):
    """Has a parameter that every stage has."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self.shift = nn.Parameter(torch.zeros(32))

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits_of(hidden + self.shift)


SHORT: dict[str, tuple[dict[str, Any], int]] = {
    "1f1b": ({"preset": "zero3", "mesh": {"pp": 8, "dp": 2}, "accumulate": 12}, 1),
    "zb-h1": (
        {
            "mesh": {"pp": 8},
            "accumulate": 16,
            "pipeline": {"schedule": "zb-h1"},
            "activations": {"policy": "recompute"},
        },
        1,
    ),
    "interleaved": (
        {"mesh": {"pp": 8}, "accumulate": 16, "pipeline": {"schedule": "interleaved", "virtual_stages": 2}},
        2,
    ),
    "offload": ({"mesh": {"pp": 8}, "accumulate": 12, "activations": {"policy": "offload"}}, 1),
}


def in_a_row(num_stages: int, of_each: int = 1) -> tuple[list[list[str]], int]:
    """Stages of as many blocks, but for the first one, which has two more, and how many blocks there are."""
    numbers = iter(range(num_stages * of_each + 2))
    stages = [[f"blocks.{next(numbers)}" for _ in range(of_each + 2 * (stage == 0))] for stage in range(num_stages)]
    return [["tokens", *stages[0]], *stages[1:-1], [*stages[-1], "norm", "head"]], num_stages * of_each + 2


def asides(model: nn.Module, policy: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By stage: the bytes that a first half of a backward is counted to keep."""
    record, found = StageRehearsal.record, dict[int, int]()

    def noted(self: StageRehearsal, stage: int) -> StageRecord:
        made = record(self, stage)
        found[stage] = made.aside
        return made

    values = {**CASES["zb-h1"], "activations": {"policy": policy}}
    values["pipeline"] = {**values["pipeline"], "stages": STAGES}
    with monkeypatch.context() as patch:
        patch.setattr(StageRehearsal, "record", noted)
        counted(model, values, monkeypatch, of_few=False, on_cpu=False)
    return [found[stage] for stage in sorted(found)]


def test_what_a_first_half_keeps_does_not_depend_on_what_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs and output gradients of linear layers. What a backward computes again is there once, and where the forward
    has freed an input, another one must not be taken for it."""
    kept = asides(on_meta(Decoder), "keep", monkeypatch)
    assert kept[0] == 0 < min(kept[1:]), "the first rank's backwards are whole"
    assert kept[1] == kept[2] == kept[3]
    for policy in ("selective", "recompute"):
        assert asides(on_meta(Decoder), policy, monkeypatch) == kept, policy


def set_aside(block: nn.Module) -> int:
    """The bytes that a block of a stage keeps for the second half of its backward."""
    deferred = WeightGrads([block])
    deferred.attach()
    output = block(torch.zeros(2, 6, 32, requires_grad=True))
    with deferred.put_aside() as aside:
        output.sum().backward()
    if not aside:
        return 0
    inputs = {one.inputs.data_ptr(): one.inputs.nbytes for one in aside}
    others = (param for param in block.parameters() if param.requires_grad and param not in deferred.params)
    return sum(inputs.values()) + sum(one.gradient.nbytes for one in aside) + sum(param.nbytes for param in others)


@pytest.mark.parametrize("frozen", [(), ("qkv",), ("up", "down"), ("qkv", "out", "up", "down")])
def test_a_first_half_keeps_nothing_of_frozen_layers(frozen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under LoRA, whose frozen layers are most of a model: what it keeps of a block is what is put aside there."""

    def freeze(block: nn.Module) -> nn.Module:
        for name in frozen:
            block.get_submodule(name).requires_grad_(False)
        return block

    model = on_meta(Decoder)
    freeze(model.blocks[3])  # type: ignore[index]  # a list
    whole, of_few = (set_aside(block) for block in (Stack(1).blocks[0], freeze(Stack(1).blocks[0])))
    assert asides(model, "keep", monkeypatch)[1:4] == [whole, of_few, whole]


@sampled
@pytest.mark.parametrize("case", SHORT)
def test_most_ranks_of_a_pipeline_are_left_out(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is found is as if all had been there, to the byte, the operation and the name; no stage is rehearsed
    beyond those of five ranks."""
    values, chunks = SHORT[case]
    stages, num_blocks = in_a_row(8 * chunks)
    values = {**values, "pipeline": {**values.get("pipeline", {}), "stages": stages}}
    few = FewBlocks.of(on_meta(Decoder, num_blocks))
    made: list[int] = []

    def with_blocks(num: int) -> nn.Module:
        made.append(num)
        return few.with_blocks(num)

    short, rehearsed = counted(few.model, values, monkeypatch, of_few=True, on_cpu=False, with_blocks=with_blocks)
    every, _ = counted(on_meta(Decoder, num_blocks), values, monkeypatch, of_few=True, on_cpu=False)
    assert short == every
    num_ranks = 4 if chunks > 1 else 5
    assert made == [num_ranks * chunks + 2]
    assert max(rehearsed) == num_ranks * chunks - 1


@thorough_only("slow; tests beside it have other stages of which few do not tell")
@sampled
@pytest.mark.parametrize("build", [Remembers, Between])
def test_no_rank_is_left_out_where_others_do_not_tell(build: type[Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inner stages read results of distant ones, or all have some parameter."""
    stages, num_blocks = in_a_row(6)
    values = {"mesh": {"pp": 6}, "accumulate": 12, "pipeline": {"stages": stages}}
    few = FewBlocks.of(on_meta(build, num_blocks))
    short, _ = counted(few.model, values, monkeypatch, of_few=True, on_cpu=False, with_blocks=few.with_blocks)
    every, _ = counted(on_meta(build, num_blocks), values, monkeypatch, of_few=True, on_cpu=False)
    assert short == every
