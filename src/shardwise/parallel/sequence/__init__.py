"""Sequence parallelism: the tokens of a sample are split over the ranks along `sp`; Ulysses and ring attention.

Names are imported when they are first used, because only jobs with that axis need most of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
    from shardwise.parallel.sequence.blocks import Weighing
    from shardwise.parallel.sequence.outliving import SplitBatches, WholeOutputs
    from shardwise.parallel.sequence.parallel import SequenceParallel
    from shardwise.parallel.sequence.refusals import check_model
    from shardwise.parallel.sequence.rehearsed import rehearsed_by
    from shardwise.parallel.sequence.ring import ring_attention
    from shardwise.parallel.sequence.token_layout import Layout
    from shardwise.parallel.sequence.ulysses import ulysses_attention
    from shardwise.parallel.sequence.visibility import Visibility

__all__ = [
    "Layout",
    "SequenceParallel",
    "SplitBatches",
    "Visibility",
    "Weighing",
    "WholeOutputs",
    "check_model",
    "rehearsed_by",
    "ring_attention",
    "ulysses_attention",
]

_HOMES = {
    "Layout": ".token_layout",
    "SequenceParallel": ".parallel",
    "SplitBatches": ".outliving",
    "Visibility": ".visibility",
    "Weighing": ".blocks",
    "WholeOutputs": ".outliving",
    "check_model": ".refusals",
    "rehearsed_by": ".rehearsed",
    "ring_attention": ".ring",
    "ulysses_attention": ".ulysses",
}

__getattr__ = imported_when_used(__name__, _HOMES)
