"""Sequence parallelism: the tokens of a sample are split over the ranks along `sp`; Ulysses and ring attention."""

from shardwise.sequence.blocks import Weighing
from shardwise.sequence.check import check_model
from shardwise.sequence.joining import WholeOutputs
from shardwise.sequence.layout import Layout
from shardwise.sequence.parallel import SequenceParallel
from shardwise.sequence.rehearsed import rehearsed_by
from shardwise.sequence.ring import ring_attention
from shardwise.sequence.ulysses import ulysses_attention
from shardwise.sequence.visibility import Visibility

__all__ = [
    "Layout",
    "SequenceParallel",
    "Visibility",
    "Weighing",
    "WholeOutputs",
    "check_model",
    "rehearsed_by",
    "ring_attention",
    "ulysses_attention",
]
