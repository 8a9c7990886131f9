"""Which tokens of a sample are on which rank of a sequence line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

Tensor = torch.Tensor


class Run(NamedTuple):
    """Tokens `start` up to, but not including, `stop` of a whole sample."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """`num_tokens` tokens, including padding, divided evenly among `num_ranks` ranks.

    If contiguous, rank i of n has the i-th of n parts. In zig-zag order it has part i and part 2 n - 1 - i of 2 n
    parts, so that under a causal mask, where late tokens see more than early ones, all ranks have the same amount of
    work (Brandon et al., Striped Attention, arXiv:2311.09431, describes the imbalance; the order is that of Llama 3's
    context parallelism, arXiv:2407.21783).
    """

    num_tokens: int
    num_ranks: int
    is_zigzag: bool = False

    @staticmethod
    def multiple(num_ranks: int, *, is_zigzag: bool) -> int:
        """The number of tokens has to be a multiple of this."""
        return 2 * num_ranks if is_zigzag else num_ranks

    @property
    def num_local(self) -> int:
        """Tokens on each rank."""
        return self.num_tokens // self.num_ranks

    @cached_property
    def runs(self) -> tuple[tuple[Run, ...], ...]:
        """For each rank its parts of the sample, in the order in which it stores them."""
        if not self.is_zigzag:
            return tuple((Run(rank * self.num_local, (rank + 1) * self.num_local),) for rank in range(self.num_ranks))
        part, last = self.num_local // 2, 2 * self.num_ranks - 1
        return tuple(
            (Run(rank * part, (rank + 1) * part), Run((last - rank) * part, (last - rank + 1) * part))
            for rank in range(self.num_ranks)
        )

    def take(self, whole: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of `whole` on `rank`, contiguous; dimension `dim` is the tokens."""
        parts = [whole.narrow(dim, run.start, run.numel) for run in self.runs[rank]]
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, by_rank: list[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor from every rank's part: the inverse of `take`."""
        placed: dict[int, Tensor] = {}
        for runs, tensor in zip(self.runs, by_rank, strict=True):
            parts = torch.split_with_sizes(tensor, [run.numel for run in runs], dim)
            placed |= {run.start: part for run, part in zip(runs, parts, strict=True)}
        return torch.cat([placed[start] for start in sorted(placed)], dim)
