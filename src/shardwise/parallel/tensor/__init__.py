"""Tensor parallelism: modules are split along one dimension over ranks that share each sample (arXiv:1909.08053).

Names are imported when they are first used, because only jobs with that axis need most of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.plan.mesh import TENSOR_AXIS as AXIS
from shardwise.system.first_use import imported_when_used

if TYPE_CHECKING:
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
    from shardwise.parallel.tensor.loss import cross_entropy
    from shardwise.parallel.tensor.model_split import ModelSplit
    from shardwise.parallel.tensor.regions import Regions
    from shardwise.parallel.tensor.split_logits import full_tensor
    from shardwise.parallel.tensor.splitting import begin_stages, split_for
    from shardwise.parallel.tensor.verify import Verifier

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

_HOMES = {
    "Generators": ".generators",
    "ModelSplit": ".model_split",
    "Regions": ".regions",
    "Verifier": ".verify",
    "begin_stages": ".splitting",
    "copy_to": ".functions",
    "cross_entropy": ".loss",
    "draws": ".generators",
    "full_tensor": ".split_logits",
    "gather_from": ".functions",
    "gather_to": ".functions",
    "reduce_from": ".functions",
    "reduce_scatter_from": ".functions",
    "scatter_to": ".functions",
    "split_for": ".splitting",
    "whole_head": ".forwards",
}

__getattr__ = imported_when_used(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
