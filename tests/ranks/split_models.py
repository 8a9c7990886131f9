"""Small models that tests split along model axes, with their plans."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
VOCABULARY, LENGTH = 40, 12


class Attention(nn.Module):
    """Causal attention with fused projections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.width = width
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).split(self.width, -1)]
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, num_heads)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """A causal language model; returns the loss of predicting each next token."""

    def __init__(self, *, tied: bool = True, width: int = 24, num_heads: int = 4, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.through_blocks(self.embed(tokens) + self.positions.weight[: tokens.shape[1]])
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Recomputing(Transformer):
    """Its blocks are computed again in the backward."""

    reentrant = False

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


TENSOR: dict[str, Any] = {
    "plan": {
        "blocks.*.attn.qkv": {"style": "column", "parts": 3, "heads": 4},
        "blocks.*.attn.out": {"style": "row", "heads": 4},
        "blocks.*.up": "column",
        "blocks.*.down": "row",
        "embed": "vocabulary",
        "head": "vocabulary",
    },
    "divide": {"blocks.*.attn": ["num_heads", "width"]},
}


def tokens(step: int, rows: int = 4) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
