"""What all runs of `shardwise bench learning` have in common: the model, the text, and the rate of each step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.fresh import ROOT
from benchmarks.model import GPT
from benchmarks.sizes import Size

SEQ, ROWS = 32, 8
RATE, WARM_UP = 2e-3, 20
CHECKPOINTS, BETWEEN = 5, 20
"""The last ones of a run, whose weights are averaged, and the steps from one to the next."""
UNSEEN_ROWS, UNSEEN_BATCH = 2048, 64
BLOCK_BYTES = 8192
"""Of the text, each tenth block of these is not trained on."""


@dataclass(frozen=True)
class Text:
    """Bytes, and those of them that no step sees."""

    seen: Tensor
    unseen: Tensor
    checksum: int

    @classmethod
    def of_the_library(cls, root: Path = ROOT) -> Text:
        files = sorted((root / "src" / "shardwise").rglob("*.py"))
        whole = b"".join(file.read_bytes() for file in files)
        *blocks, _ = torch.split(torch.frombuffer(bytearray(whole), dtype=torch.uint8), BLOCK_BYTES)
        seen = torch.cat([block for place, block in enumerate(blocks) if place % 10 != 9])
        return cls(seen, torch.cat(blocks[9::10]), zlib.crc32(whole))

    def batch(self, numbers: torch.Generator, rows: int) -> Tensor:
        return _rows(self.seen, torch.randint(0, len(self.seen) - SEQ, (rows,), generator=numbers))

    def unseen_batches(self) -> Sequence[Tensor]:
        starts = torch.linspace(0, len(self.unseen) - SEQ - 1, UNSEEN_ROWS).long()
        rows: Sequence[Tensor] = torch.split(_rows(self.unseen, starts), UNSEEN_BATCH)
        return rows

    def unseen_loss(self, model: Callable[[Tensor], Any], share: int, num_shares: int) -> float:
        """Of the rows of one rank of so many."""
        with torch.no_grad():
            return mean(float(model(rows.chunk(num_shares)[share])) for rows in self.unseen_batches())


def _rows(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(SEQ + 1)].long()


def first_model(seed: int, width: int) -> GPT:
    """With the values that all runs of `seed` begin with."""
    torch.manual_seed(seed)
    return GPT(Size(num_blocks=2, dim=width, vocab=256, seq=SEQ, micro_batch=ROWS, head_dim=32))


def rate_of(number: int, steps: int, highest: float = RATE) -> float:
    """Of the learning in step `number`, the first of which is 1: up to `highest`, then down to zero along a cosine."""
    return highest * min(1.0, number / WARM_UP) * 0.5 * (1 + math.cos(math.pi * (number - 1) / steps))


def is_checkpoint(number: int, steps: int) -> bool:
    """Whether the weights after step `number` are among those that are averaged."""
    return steps - number in range(0, CHECKPOINTS * BETWEEN, BETWEEN)


def averaged(checkpoints: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: _mean([one[name] for one in checkpoints]) for name in checkpoints[0]}


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.double() for each in tensors]).mean(0).to(tensors[0].dtype)
