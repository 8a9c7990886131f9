"""The models of `planner`, of three shapes: many narrow blocks, few wide ones, and long sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from benchmarks.model import Block


class Gpt(nn.Module):
    """Returns its own loss, of predicting each of `labels` from the tokens up to its place."""

    def __init__(self, dim: int, num_blocks: int, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class ModelSize:
    dim: int
    num_blocks: int
    vocab: int
    samples: int
    """Of a micro-batch on one data rank."""
    length: int

    def build(self) -> nn.Module:
        return Gpt(self.dim, self.num_blocks, self.vocab)


MODELS: Mapping[str, ModelSize] = {
    "narrow": ModelSize(256, 12, 2048, 4, 128),
    "wide": ModelSize(768, 3, 4096, 2, 256),
    "long": ModelSize(384, 4, 2048, 1, 1024),
    "tiny": ModelSize(64, 2, 128, 2, 32),
}


def rows_of(size: ModelSize, num_micro_batches: int, rows: int) -> tuple[Tensor, Tensor]:
    """Token ids of a rank's share of one step, in micro-batches of `rows` samples, and what each predicts: shifted
    here, because a rank along `sp` has not the first token of the next one's part."""
    shape = (rows * num_micro_batches, size.length + 1)
    ids = torch.randint(0, size.vocab, shape, generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
