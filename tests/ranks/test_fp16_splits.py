"""Models split along `tp`, `sp`, `pp` and products of them, in fp16: near the plain model, as far as fp16 rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import sequences
import torch
from pipelined import batches
from sequences import split_run
from split_models import TENSOR, Block
from test_pipeline import CLIP, MICRO_BATCHES, pipelined
from test_split_products import CUT, net
from torch import nn
from twins import Run, assert_as_near, plain_run

from tests.models import WIDTH, Gpt
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
NUM_STEPS = 3
GPT_TENSOR = {**TENSOR, "plan": {name: rule for name, rule in CUT["plan"].items() if name != "head"}}
"""The head has the weight of the embedding, and is split with it."""


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Its epsilon is above the rounding in fp16 of gradients that are zero but for it (of keys' biases)."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def assert_trains_in_fp16(run: Any, model: nn.Module, twin: Run, wide: Run) -> None:
    """`run` is as near to the plain fp16 run `twin` as a few times what fp16 rounding changes in the plain model; that
    is little of what the steps change."""
    assert all(map(math.isfinite, run.norms)), "no step was left out"
    found = Run(run.losses, run.norms, {name: value.float() for name, value in run.params.items()})
    assert_as_near(found, twin, wide)
    start = {name: param.detach() for name, param in model.named_parameters()}
    moved = max(float((value - start[name]).abs().max()) for name, value in wide.params.items())
    rounding = max(float((value - twin.params[name]).abs().max()) for name, value in wide.params.items())
    assert 4 * rounding < moved / 10


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [("zero1", {"dp": 2, "tp": 2}), ("zero3", {"dp": 1, "tp": 2}), ("zero1", {"pp": 2, "tp": 2})],
    ids=["dp-tp", "tp", "pp-tp"],
)
def test_split_layers(preset: str, mesh: dict[str, int]) -> None:
    """In micro-batches. The plain model takes the same one after the other."""
    model, data = net(tied=False), batches(NUM_STEPS, 16)
    runs = pipelined(model, mesh, data, optimizer=optimizer_of, preset=preset, tensor=CUT, precision="fp16")
    shares = MICRO_BATCHES * mesh.get("dp", 1)
    twin = plain_run(model, data, optimizer_of, clip=CLIP, shares=shares, dtype=torch.float16)
    wide = plain_run(model, data, optimizer_of, clip=CLIP)
    for run in runs:
        assert_trains_in_fp16(run, model, twin, wide)


class SplitGpt(Gpt):
    """Of blocks whose attention takes the heads that are there."""

    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks.extend(Block(WIDTH, 4) for _ in range(2))


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("mesh", [{"sp": 2}, {"tp": 2, "sp": 2}], ids=["sp", "tp-sp"])
def test_split_sequences(mesh: Mapping[str, int], attention: str) -> None:
    model, data = SplitGpt(), sequences.batches(NUM_STEPS)
    run = split_run(
        model,
        data,
        "zero1",
        mesh,
        make_optimizer=optimizer_of,
        grads_of=lambda _: {},
        tensor=GPT_TENSOR,
        precision="fp16",
        clip_grad_norm=CLIP,
        sequence={"attention": attention},
    )
    pairs = [(batch["input_ids"], batch["labels"]) for batch in data]

    def forward(plain: Any, pair: tuple[Tensor, Tensor]) -> Tensor:
        positions = torch.arange(sequences.TOKENS).expand_as(pair[0])
        return sequences.mean_loss(plain, {"input_ids": pair[0], "position_ids": positions, "labels": pair[1]})

    twin = plain_run(model, pairs, optimizer_of, clip=CLIP, dtype=torch.float16, forward=forward)
    assert_trains_in_fp16(run, model, twin, plain_run(model, pairs, optimizer_of, clip=CLIP, forward=forward))
