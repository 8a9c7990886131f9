"""The model and the data of every race."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from benchmarks.sizes import Size


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, seq, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, dim))
        out: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class GPT(nn.Module):
    """Called with tokens of shape (batch, seq + 1); returns the mean cross-entropy, in fp32."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocab, size.dim)
        self.positions = nn.Embedding(size.seq, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim, size.dim // size.head_dim) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build_model(size: Size, device: str = "cpu") -> GPT:
    """The same values on every rank and in every engine."""
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(size)


def batch_of(size: Size, rank: int) -> Tensor:
    """What `rank` is given, at every step anew.

    The same tokens each time, so that the loss falls fast: an engine that trained on its own batch alone, or
    kept its gradients to itself, would be far from the others after a few steps.
    """
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randint(0, size.vocab, (size.micro_batch, size.seq + 1), generator=generator)
