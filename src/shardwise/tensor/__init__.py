"""Tensor parallelism: modules cut along one dimension, by ranks that share each sample (arXiv:1909.08053)."""

from shardwise.tensor.functions import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from shardwise.tensor.line import Line
from shardwise.tensor.regions import Regions
from shardwise.tensor.split import AXIS, Split, split_for

__all__ = [
    "AXIS",
    "Line",
    "Regions",
    "Split",
    "copy_to",
    "gather_from",
    "gather_to",
    "reduce_from",
    "reduce_scatter_from",
    "scatter_to",
    "split_for",
]
