"""Small models and meshes drawn at random: split sequences, compared with the same model in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from sequences import counted_loss, split_run, whole_run
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from twins import assert_alike

from tests.thorough import drawn, thorough_only, varies

Tensor = torch.Tensor
VOCAB, DIM = 31, 4
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept")
MESHES: list[dict[str, int]] = [{"sp": 2}, {"sp": 4}, {"sp": 3}, {"dp": 2, "sp": 2}, {"sp": 2, "dp": 2}]


@dataclass(frozen=True)
class Shape:
    """What is drawn for a model."""

    num_kv_heads: int
    num_groups: int
    num_blocks: int
    is_causal: bool
    recomputes: bool
    freezes: bool


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.num_heads = shape.num_kv_heads * shape.num_groups
        width = self.num_heads * DIM
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * shape.num_kv_heads * DIM, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        query = self.query(normed).unflatten(-1, (self.num_heads, DIM)).transpose(1, 2)
        key, value = self.key_value(normed).unflatten(-1, (2, self.shape.num_kv_heads, DIM)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.shape.is_causal, enable_gqa=self.shape.num_groups > 1, scale=1.0
        )
        return x + self.out(functional.gelu(attended.transpose(1, 2).flatten(2)))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_kv_heads * shape.num_groups * DIM
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(24, width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_blocks))
        self.head = nn.Linear(width, VOCAB)
        if shape.freezes:
            self.layers[0].query.weight.requires_grad_(False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False) if self.shape.recomputes else layer(hidden)
        return self.head(hidden)


SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    num_groups=st.integers(1, 3),
    num_blocks=st.integers(1, 2),
    is_causal=st.booleans(),
    recomputes=st.booleans(),
    freezes=st.booleans(),
)


@thorough_only("drawn combinations; test_sequence has fixed ones")
@varies
@settings(max_examples=drawn(2, 40), deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    shape=SHAPES,
    mesh=st.sampled_from(MESHES),
    preset=st.sampled_from(PRESETS),
    asked=st.sampled_from(["ulysses", "ring"]),
    num_tokens=st.integers(4, 24),
    accumulate=st.sampled_from([1, 2]),
    clip=st.sampled_from([None, 0.1]),
    seed=st.integers(0, 1000),
)
def test_trains_as_the_whole_model(
    shape: Shape,
    mesh: dict[str, int],
    preset: str,
    asked: str,
    num_tokens: int,
    accumulate: int,
    clip: float | None,
    seed: int,
) -> None:
    divides = shape.num_kv_heads * shape.num_groups % mesh["sp"] == 0
    attention = asked if divides else "ring"
    torch.manual_seed(seed)
    model = Model(shape)
    rows = 2 * accumulate
    data = []
    for _ in range(2):
        drawn = torch.randint(0, VOCAB, (rows, num_tokens + 1))
        labels = drawn[:, 1:].masked_fill(torch.rand(rows, num_tokens) < 0.3, -100)
        labels[:, -1] = 1
        positions = torch.arange(num_tokens).expand(rows, -1)
        data.append({"input_ids": drawn[:, :-1], "position_ids": positions, "labels": labels})
    plan: dict[str, Any] = {"sequence": {"attention": attention}, "accumulate": accumulate, "clip_grad_norm": clip}
    run = split_run(model, data, preset, mesh, loss_of=counted_loss, **plan)
    twin = whole_run(model, data, loss_of=counted_loss, shares=accumulate, clip=clip)
    assert_alike(run, twin, tolerance=2e-5)
