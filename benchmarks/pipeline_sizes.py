"""The GPTs that are cut into stages. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSize:
    """Few words, so that the blocks, and with them the stages, are all that counts and are all alike."""

    num_blocks: int
    dim: int
    seq: int
    micro_batch: int
    num_micro_batches: int
    vocab: int = 256


PIPELINE_SIZES = {
    "tiny": PipelineSize(num_blocks=4, dim=64, seq=32, micro_batch=1, num_micro_batches=4),
    "light": PipelineSize(num_blocks=8, dim=256, seq=64, micro_batch=2, num_micro_batches=8),
    "held": PipelineSize(num_blocks=8, dim=256, seq=256, micro_batch=2, num_micro_batches=8),
    "heavy": PipelineSize(num_blocks=8, dim=512, seq=128, micro_batch=2, num_micro_batches=8),
}
