"""A small GPT: pre-norm blocks, rotary positions, tied embedding. Plain PyTorch.

Nothing here knows that it may be sharded. `blocks` is an `nn.ModuleList` of one class, which is what
`units: auto` gathers and frees one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 the name all of PyTorch has for it


@dataclass(frozen=True)
class ModelSize:
    """The sizes that make a model; the default has 0.7 M parameters.

    So small that two slow cores take 800,000 tokens through it in a minute and a half. One of twice as many parameters,
    which sees half as many tokens in that time, ends at a larger loss.
    """

    vocabulary: int = 512
    layers: int = 3
    width: int = 128
    heads: int = 4
    context: int = 128

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ValueError(f"a width of {self.width} does not make {self.heads} heads of an even size")


class Attention(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_size = size.width // size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        # However many heads there are here: a plan may leave a rank some of them.
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.norm2 = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """`model(x)` gives logits `[rows, length, vocabulary]`; `model(x, y)` the mean cross entropy in nats per token.

    `x` and `y` are int64 `[rows, length]` with `length <= size.context`.
    """

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.embedding(x)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if y is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    def _init(self, module: nn.Module) -> None:
        """As in GPT-2 (Radford et al. 2019): 0.02, and less where a layer writes into the residual stream."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, Block):
            for residual in (module.attention.out, module.down):
                nn.init.normal_(residual.weight, std=0.02 / math.sqrt(2 * self.size.layers))


def rotate(x: Tensor) -> Tensor:
    """Turn each pair of coordinates by its place in the row, `x` being `[rows, heads, length, dims]`.

    Rotary positions (Su et al. 2021): attention sees distances and need not learn them first.
    """
    length, dims = x.shape[-2:]
    speeds = 10_000 ** (-torch.arange(0, dims, 2, device=x.device) / dims)
    angles = torch.outer(torch.arange(length, device=x.device), speeds)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x.chunk(2, dim=-1)
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups for AdamW: matrices decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def generate(model: GPT, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """The tokens that follow `prompt`, one by one. All ranks call with the same arguments and get the same.

    The model always sees a full context, zeros after the text, which no earlier token attends to: on a CPU
    every new length compiles new kernels, and their cache took 370 MiB by the end of 300 tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    for _ in range(num_tokens):
        seen = text[:, -model.size.context :]
        with torch.no_grad():
            logits = model(F.pad(seen, (0, model.size.context - seen.shape[1])))[0, seen.shape[1] - 1]
        chances = torch.softmax(logits.float() / temperature, dim=0)
        drawn = torch.multinomial(chances, 1, generator=draw)
        text = torch.cat([text, drawn[None]], dim=1)
        yield int(drawn)
