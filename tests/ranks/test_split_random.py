"""Small models, meshes and plans drawn at random: stages, split layers and data axes, compared with the unsplit model.

In fp64, because norms over four features, and Adam where a gradient is only rounding, amplify fp32's rounding.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pipelined import batches, unsplit
from split_models import Block
from test_pipeline import assert_same, pipelined
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import Decoder
from tests.thorough import drawn, thorough_only, varies

NUM_STEPS, MOST_RANKS, DIM = 3, 6, 4
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept")
SIZES = [size for size in itertools.product((1, 2, 3), repeat=3) if 2 <= math.prod(size) <= MOST_RANKS]
MESHES = [
    {axis: dict(zip(("pp", "dp", "tp"), size, strict=True))[axis] for axis in axes}
    for size in SIZES
    for axes in itertools.permutations(("pp", "dp", "tp"))
]


@dataclass(frozen=True)
class Shape:
    """What is drawn for a model."""

    num_heads: int
    num_blocks: int
    recomputes: bool
    tied: bool
    cuts_words: bool
    frozen: frozenset[str]


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return made


class Model(Decoder):
    def __init__(self, shape: Shape) -> None:
        width = shape.num_heads * DIM
        super().__init__(tied=shape.tied, num_blocks=0, width=width)
        kind = Recomputed if shape.recomputes else Block
        self.blocks.extend(kind(width, shape.num_heads) for _ in range(shape.num_blocks))
        for name, module in self.named_modules():
            if name in shape.frozen and not (shape.tied and name == "head"):
                module.requires_grad_(False)


def tensor_plan(shape: Shape) -> dict[str, Any]:
    heads = shape.num_heads
    plan: dict[str, Any] = {
        "blocks.*.attn.qkv": {"style": "column", "parts": 3, "heads": heads},
        "blocks.*.attn.out": {"style": "row", "heads": heads},
        "blocks.*.up": "column",
        "blocks.*.down": "row",
    }
    if shape.cuts_words:
        plan["tokens"] = "vocabulary"
    return {"plan": plan, "divide": {"blocks.*.attn": ["num_heads", "width"]}}


@st.composite
def runs(draw: Any) -> tuple[Shape, dict[str, Any]]:
    mesh = draw(st.sampled_from(MESHES))
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"])) if mesh["pp"] > 1 else "1f1b"
    chunks = draw(st.sampled_from([2, 3])) if schedule == "interleaved" else 1
    micro_batches = mesh["pp"] * draw(st.integers(1, 2)) + (draw(st.integers(0, 1)) if chunks == 1 else 0)
    shape = Shape(
        num_heads=draw(st.integers(mesh["tp"], 4)),
        num_blocks=mesh["pp"] * chunks + draw(st.integers(0, 2)),
        recomputes=draw(st.booleans()),
        tied=draw(st.booleans()),
        cuts_words=draw(st.booleans()),
        frozen=draw(st.frozensets(st.sampled_from(["tokens", "blocks.0", "blocks.1.up", "norm", "head"]), max_size=2)),
    )
    plan = {
        "preset": draw(st.sampled_from(PRESETS)),
        "precision": "fp64",
        "mesh": mesh,
        "accumulate": micro_batches,
        "clip_grad_norm": draw(st.sampled_from([None, 0.5])),
        "pipeline": {"schedule": schedule, **({"virtual_stages": chunks} if chunks > 1 else {})},
    }
    if mesh["tp"] > 1:
        plan["tensor"] = tensor_plan(shape)
    return shape, plan


@thorough_only("drawn combinations; test_split_products has a fixed one")
@varies
@pytest.mark.timeout(900)
@settings(
    max_examples=drawn(2, 30),
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(drawn_run=runs(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=2), shares=st.booleans())
@example(
    drawn_run=(  # a stage without anything to train does not see its neighbour's fp64
        Shape(2, 2, recomputes=False, tied=False, cuts_words=False, frozen=frozenset(["tokens", "blocks.0"])),
        {"preset": "zero2", "precision": "fp64", "mesh": {"pp": 2, "dp": 1, "tp": 1}, "accumulate": 2, "pipeline": {}}
        | {"clip_grad_norm": None},
    ),
    lengths=[2],
    shares=False,
)
def test_trains_as_the_unsplit_model(drawn_run: tuple[Shape, dict[str, Any]], lengths: list[int], shares: bool) -> None:
    shape, plan = drawn_run
    torch.manual_seed(0)
    model: nn.Module = Model(shape).double()
    mesh = dict(plan["mesh"])
    data = batches(NUM_STEPS, mesh["dp"] * plan["accumulate"] * 2, lengths=lengths)
    rest = {name: value for name, value in plan.items() if name != "mesh"}
    found = pipelined(model, mesh, data, shares_memory=shares, **rest)
    assert_same(found, unsplit(model, data, clip=plan["clip_grad_norm"]))
