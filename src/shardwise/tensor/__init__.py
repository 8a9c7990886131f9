"""Tensor parallelism: modules are split along one dimension over ranks that share each sample (arXiv:1909.08053)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.tensor.functions import (
    copy_to,
    gather_from,
    gather_to,
    reduce_from,
    reduce_scatter_from,
    scatter_to,
)
from shardwise.tensor.generators import Generators, draws
from shardwise.tensor.model_split import ModelSplit
from shardwise.tensor.partition import AXIS
from shardwise.tensor.planning import begin_stages, split_for
from shardwise.tensor.regions import Regions
from shardwise.tensor.verify import Verifier
from shardwise.tensor.views import ViewCheck

if TYPE_CHECKING:
    from shardwise.tensor.cut import full_tensor
    from shardwise.tensor.loss import cross_entropy

__all__ = [
    "AXIS",
    "Generators",
    "ModelSplit",
    "Regions",
    "Verifier",
    "ViewCheck",
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
]


def __getattr__(name: str) -> Any:
    """Load what only users of split logits need when it is first asked for."""
    if name == "full_tensor":
        from shardwise.tensor.cut import full_tensor

        return full_tensor
    if name == "cross_entropy":
        from shardwise.tensor.loss import cross_entropy

        return cross_entropy
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
