"""The sizes that are raced. No torch here: whoever only reads results need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A GPT, what each rank gives it per step, and on how many ranks."""

    num_blocks: int
    dim: int
    vocab: int = 8192
    seq: int = 256
    micro_batch: int = 2
    head_dim: int = 64
    num_ranks: int = 2

    @property
    def block_params(self) -> int:
        """Parameters of one block, which is what buckets are fitted to."""
        return 12 * self.dim**2 + 13 * self.dim

    @property
    def params(self) -> int:
        return self.num_blocks * self.block_params + (2 * self.vocab + self.seq + 2) * self.dim


SIZES = {
    "tiny": Size(num_blocks=2, dim=64, vocab=256, seq=32, head_dim=16),
    "small": Size(num_blocks=8, dim=512),
    "large": Size(num_blocks=9, dim=1024),
    "tall": Size(num_blocks=48, dim=256),
    "few-tokens": Size(num_blocks=8, dim=512, seq=64, micro_batch=1),
    "tall-few-tokens": Size(num_blocks=48, dim=256, seq=64, micro_batch=1),
    "wires": Size(num_blocks=8, dim=512, vocab=256, seq=16, micro_batch=1),
    "hosts": Size(num_blocks=6, dim=192, vocab=256, seq=16, micro_batch=1),
    "ranks4": Size(num_blocks=8, dim=512, num_ranks=4),
}
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Race:
    """What all engines are given: a size, what forward and backward compute in, and where."""

    size: Size
    dtype: str
    device: str = "cpu"

    @property
    def backend(self) -> str:
        return "nccl" if self.device == "cuda" else "gloo"
