"""Blocks of a Llama, as small as they can be written, and the model of transformers that is like them.

Modules have the names that transformers gives them, so that one plan fits both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

HEAD_DIM = 64
COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class LlamaSize:
    """A Llama, and the tokens that a rank is given at once: `batch` rows of `seq`."""

    num_blocks: int
    dim: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    seq: int
    batch: int

    @classmethod
    def of_width(cls, num_blocks: int, dim: int, seq: int, batch: int, vocab: int = 512) -> LlamaSize:
        """Heads of `HEAD_DIM`, half as many for keys as for queries; `hidden` is a multiple of 64."""
        num_heads = dim // HEAD_DIM
        return cls(num_blocks, dim, dim * 8 // 3 // 64 * 64, num_heads, num_heads // 2, vocab, seq, batch)

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def flops_per_step(self, num_params: int) -> float:
        """Of one training step: six per parameter (the embedding's lookup excepted) and token, and causal attention
        (PaLM's model FLOPs, arXiv:2204.02311, appendix B); recomputation does not count."""
        matrices = 6 * (num_params - self.vocab * self.dim) * self.tokens
        attention = 6 * self.num_blocks * self.seq * self.dim * self.tokens  # half of 12: causal
        return matrices + attention


LLAMA_SIZES = {
    "tiny": LlamaSize.of_width(num_blocks=2, dim=256, seq=32, batch=1),
    "narrow": LlamaSize.of_width(num_blocks=8, dim=256, seq=128, batch=1),
    "wide": LlamaSize.of_width(num_blocks=4, dim=1024, seq=256, batch=2),
}


class Attention(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        keys = size.num_kv_heads * HEAD_DIM
        self.q_proj = nn.Linear(size.dim, size.dim, bias=False)
        self.k_proj = nn.Linear(size.dim, keys, bias=False)
        self.v_proj = nn.Linear(size.dim, keys, bias=False)
        self.o_proj = nn.Linear(size.dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class FeedForward(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.hidden, bias=False)
        self.up_proj = nn.Linear(size.dim, size.hidden, bias=False)
        self.down_proj = nn.Linear(size.hidden, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(size.dim, eps=1e-6)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = nn.RMSNorm(size.dim, eps=1e-6)
        self.mlp = FeedForward(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Blocks(nn.Module):
    """Called with hidden states of shape (batch, seq, dim); returns the mean square of what comes of them, in fp32."""

    def __init__(self, size: LlamaSize) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        frequencies = 1 / 10_000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(size.seq), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x.float().square().mean()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By rotary angles, in halves as Llama has it."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def build_blocks(size: LlamaSize) -> Blocks:
    """The same values on every rank and in every engine."""
    torch.manual_seed(0)
    return Blocks(size)


def hidden_states(size: LlamaSize) -> Tensor:
    """What all ranks of the axis are given, at every step anew."""
    return torch.randn(size.batch, size.seq, size.dim, generator=torch.Generator().manual_seed(1))


def transformers_config(size: LlamaSize) -> Any:
    from transformers import LlamaConfig

    config: Any = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.dim,
        intermediate_size=size.hidden,
        num_hidden_layers=size.num_blocks,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        max_position_embeddings=size.seq,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    return config


def token_batch(size: LlamaSize) -> Tensor:
    return torch.randint(0, size.vocab, (size.batch, size.seq), generator=torch.Generator().manual_seed(1))
