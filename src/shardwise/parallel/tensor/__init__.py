"""Tensor parallelism: modules are split along one dimension over ranks that share each sample (arXiv:1909.08053)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.parallel.tensor.forwards import whole_head
from shardwise.parallel.tensor.functions import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from shardwise.parallel.tensor.generators import Generators, draws
from shardwise.parallel.tensor.model_split import ModelSplit
from shardwise.parallel.tensor.partition import AXIS
from shardwise.parallel.tensor.regions import Regions
from shardwise.parallel.tensor.splitting import begin_stages, split_for
from shardwise.parallel.tensor.verify import Verifier

if TYPE_CHECKING:
    from shardwise.parallel.tensor.loss import cross_entropy
    from shardwise.parallel.tensor.split_logits import full_tensor

__all__ = [
    "AXIS",
    "Generators",
    "ModelSplit",
    "Regions",
    "Verifier",
    "begin_stages",
    "copy_to",
    "cross_entropy",
    "draws",
    "full_tensor",
    "gather_from",
    "gather_to",
    "reduce_from",
    "reduce_scatter_from",
    "scatter_to",
    "split_for",
    "whole_head",
]


def __getattr__(name: str) -> Any:
    """Load what only users of split logits need when it is first asked for."""
    if name == "full_tensor":
        from shardwise.parallel.tensor.split_logits import full_tensor

        return full_tensor
    if name == "cross_entropy":
        from shardwise.parallel.tensor.loss import cross_entropy

        return cross_entropy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
