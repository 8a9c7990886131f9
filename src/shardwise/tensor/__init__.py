"""Tensor parallelism: modules cut along one dimension, by ranks that share each sample (arXiv:1909.08053)."""

from shardwise.tensor.design import begin_stages, split_for
from shardwise.tensor.first_batch import FirstBatch
from shardwise.tensor.functions import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from shardwise.tensor.generators import Generators, draws
from shardwise.tensor.loss import cross_entropy
from shardwise.tensor.regions import Regions
from shardwise.tensor.shares import AXIS
from shardwise.tensor.split import Split
from shardwise.tensor.verify import Verifier
from shardwise.tensor.views import ViewCheck

__all__ = [
    "AXIS",
    "FirstBatch",
    "Generators",
    "Regions",
    "Split",
    "Verifier",
    "ViewCheck",
    "begin_stages",
    "copy_to",
    "cross_entropy",
    "draws",
    "gather_from",
    "gather_to",
    "reduce_from",
    "reduce_scatter_from",
    "scatter_to",
    "split_for",
]
