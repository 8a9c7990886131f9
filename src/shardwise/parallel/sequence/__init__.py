"""Sequence parallelism: the tokens of a sample are split over the ranks along `sp`; Ulysses and ring attention."""

from shardwise.parallel.sequence.batch import SplitBatches
from shardwise.parallel.sequence.blocks import Weighing
from shardwise.parallel.sequence.parallel import SequenceParallel
from shardwise.parallel.sequence.refusals import check_model
from shardwise.parallel.sequence.rehearsed import rehearsed_by
from shardwise.parallel.sequence.ring import ring_attention
from shardwise.parallel.sequence.token_layout import Layout
from shardwise.parallel.sequence.ulysses import ulysses_attention
from shardwise.parallel.sequence.visibility import Visibility
from shardwise.parallel.sequence.whole_outputs import WholeOutputs

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
