"""LoRA layers written by hand around the linear layers of a frozen model, over every split and products of them with
ZeRO: losses, norms, the gradients of all adapters in every step, and parameters are those of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequences import TOKENS, Batch, batches, whole_run
from split_models import Attention
from test_sequence_in_stages import staged_run
from torch import nn
from torch.nn import functional
from twins import assert_alike

import shardwise as sw
from shardwise.parallel.experts import MoE
from tests.models import VOCAB, WIDTH, Lora
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
Mesh = dict[str, int]
HEADS = 4

TENSOR: dict[str, Any] = {
    "plan": {
        "*.qkv.base": {"style": "column", "parts": 3, "heads": HEADS},
        "*.qkv.up": {"style": "column", "parts": 3, "heads": HEADS},
        "*.out.base": {"style": "row", "heads": HEADS},
        "*.out.down": {"style": "row", "heads": HEADS},
        "*.widen.base": "column",
        "*.widen.up": "column",
        "*.narrow.base": "row",
        "*.narrow.down": "row",
        "tokens": "vocabulary",
        "head": "vocabulary",
    },
    "divide": {"blocks.*.attn": ["num_heads", "width"]},
}
"""Of the two small matrices, the one on the side on which the frozen matrix is split is split in the same way."""


class LoraOfParameters(nn.Module):
    """`Lora`, whose matrices are parameters of the wrapper itself."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2 * (x @ self.a.t() @ self.b.t())
        return out


class Block(nn.Module):
    """Attention, and a wide layer or experts, which stay frozen."""

    def __init__(self, lora: type[nn.Module], *, has_experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(WIDTH, HEADS)
        self.moe = MoE(WIDTH, 24, num_experts=4, top_k=2) if has_experts else None
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.requires_grad_(False)
        self.attn.qkv, self.attn.out = lora(self.attn.qkv), lora(self.attn.out)
        self.widen, self.narrow = lora(self.widen), lora(self.narrow)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        hidden = self.norm2(x)
        x = x + self.narrow(functional.gelu(self.widen(hidden)))
        return x if self.moe is None else x + self.moe(hidden)


class Adapted(nn.Module):
    def __init__(self, lora: type[nn.Module] = Lora, *, has_experts: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(lora, has_experts=has_experts) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        for around in (self.tokens, self.positions, self.norm, self.head):
            around.requires_grad_(False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(engine: sw.Engine, rows: Batch) -> Tensor:
    part = engine.split_sequence(rows) if "sp" in engine.mesh.axes else dict(rows)
    return engine.forward_backward(part, part.pop("labels"), loss_fn=mean_loss)


def race(model: nn.Module, preset: str, mesh: Mesh, **plan: Any) -> None:
    data = batches(3, rows=8)
    accumulate = max(2, mesh.get("pp", 1))
    twin = whole_run(model, data, shares=accumulate)
    plan |= {"preset": preset, "accumulate": accumulate} | ({"tensor": TENSOR} if "tp" in mesh else {})
    for run in staged_run(model, data, mesh, train, **plan):
        assert_alike(run, twin)


ALONE: list[tuple[str, Mesh]] = [
    (preset, {axis: 2}) for axis in ("pp", "sp", "tp") for preset in ("zero1", "zero2", "zero3")
]
PRODUCTS: list[tuple[str, Mesh]] = [
    ("zero1", {"pp": 2, "dp": 2}),
    ("zero2", {"pp": 2, "tp": 2}),
    ("zero3", {"pp": 2, "sp": 2}),
    ("zero3", {"tp": 2, "sp": 2}),
    ("zero3", {"dp": 2, "tp": 2}),
    ("zero3", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero1", {"pp": 2, "tp": 2, "sp": 2}),
    ("zero2", {"pp": 2, "dp": 2, "sp": 2}),
]
WITH_EXPERTS: list[tuple[str, Mesh]] = [
    ("zero1", {"ep": 2}),
    ("zero2", {"ep": 2}),
    ("zero3", {"ep": 2}),
    ("zero3", {"dp": 2, "ep": 2}),
    ("zero2", {"pp": 2, "ep": 2}),
    ("zero3", {"tp": 2, "ep": 2}),
    ("zero1", {"sp": 2, "ep": 2}),
    ("zero3", {"pp": 2, "dp": 2, "ep": 2}),
]


def name_of(one: Any) -> str:
    return "x".join(f"{axis}{size}" for axis, size in one.items()) if isinstance(one, dict) else str(one)


@sampled
@pytest.mark.parametrize(("preset", "mesh"), ALONE, ids=name_of)
def test_one_split(preset: str, mesh: Mesh) -> None:
    race(Adapted(), preset, mesh)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(("preset", "mesh"), PRODUCTS, ids=name_of)
def test_products_of_splits(preset: str, mesh: Mesh) -> None:
    race(Adapted(), preset, mesh)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize(("preset", "mesh"), WITH_EXPERTS, ids=name_of)
def test_beside_frozen_experts(preset: str, mesh: Mesh) -> None:
    race(Adapted(has_experts=True), preset, mesh)


@sampled
@pytest.mark.parametrize(
    ("preset", "mesh"),
    [
        ("zero3", {"dp": 2}),
        ("zero1", {"pp": 2}),
        ("zero2", {"sp": 2}),
        ("zero3", {"pp": 2, "dp": 2}),
        ("zero3", {"ep": 2}),
        ("zero2", {"pp": 2, "sp": 2}),
    ],
    ids=name_of,
)
def test_matrices_that_are_parameters_of_the_wrapper(preset: str, mesh: Mesh) -> None:
    race(Adapted(LoraOfParameters, has_experts="ep" in mesh), preset, mesh)


@sampled
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
def test_schedules(schedule: str) -> None:
    race(Adapted(), "zero2", {"pp": 2}, pipeline={"schedule": schedule})
