"""Stacked experts of transformers models, split by features if the model's own tensor-parallel plan says so.

Every rank has all experts, but only some of their intermediate features, so the experts return partial sums. This file
knows transformers' styles for such modules, and for their parameters of shape [experts, ., .], without importing it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.library_model import LibraryModel, library_models
from shardwise.parallel.tensor.forwards import Forward
from shardwise.parallel.tensor.functions import copy_to, reduce_from
from shardwise.parallel.tensor.known_models import EXPERTS_STYLE, STACKED_STYLES
from shardwise.parallel.tensor.model_split import ModelSplit
from shardwise.parallel.tensor.partition import AXIS, partition
from shardwise.parallel.tensor.rules import SplitModule, plan_of
from shardwise.plan.placement import Box
from shardwise.system.name_patterns import matches_end

Tensor = torch.Tensor
_ALIGNED = 8
"""Parts are multiples of this many features: torch's grouped matrix products need rows of multiples of 16 bytes."""


@dataclass(frozen=True)
class StackedExperts:
    """A module of experts that is split. `params` has by name the dimension to split, and the number of matrices fused
    along it."""

    path: str
    module: nn.Module
    params: Mapping[str, tuple[int, int]]


def experts_to_split(part: LibraryModel, excluded: Collection[str]) -> Iterator[StackedExperts]:
    """The modules of experts that the model's own plan splits, without modules `excluded`.

    Raises `ModelError` for experts with parameters for which the plan has no style.
    """
    model, own_plan = part.module, plan_of(part, excluded)
    owners = [pattern for pattern, style in own_plan.items() if style == EXPERTS_STYLE]
    for inner, module in model.named_modules():
        if not any(matches_end(inner, pattern) for pattern in owners):
            continue
        path = part.paths[inner]
        params = {}
        for name, param in module.named_parameters():
            styles = (style for pattern, style in own_plan.items() if matches_end(f"{inner}.{name}", pattern))
            style = next(styles, None)
            if style not in STACKED_STYLES or param.dim() != 3:
                raise ModelError(
                    f"The tensor-parallel plan of {type(model).__name__} does not split {path}.{name} with the other "
                    f"parameters of its experts. Add an axis ep to the mesh: ranks along it have whole experts, which "
                    f"are replicated along {AXIS}. Or set your own tensor.plan."
                )
            params[name] = STACKED_STYLES[style]
        if params:
            yield StackedExperts(path, module, params)


def split_stacked(split: ModelSplit, model: nn.Module, excluded: Collection[str]) -> None:
    """Add to `split` the experts of `model` that its own plan splits, without modules `excluded`."""
    for target in (target for part in library_models(model) for target in experts_to_split(part, excluded)):
        if split.blocks:
            raise ModelError(
                f"{target.path} has experts, which tensor.sequence does not support. Leave tensor.sequence out of the "
                f"plan."
            )
        for name, (dim, num_parts) in target.params.items():
            param = target.module.get_parameter(name)
            heads = _num_aligned(param.shape[dim] // num_parts, split.num_ranks)
            as_column = SplitModule(target.path, target.module, "column", num_parts, heads=heads)
            shares = partition(as_column, param.shape[dim], split.num_ranks)
            split.boxes[param] = Box.split(tuple(param.shape), dim, shares.ranges[split.index], 1, 0)
            split.split_by[param] = target.path
        split.forwards.append((target.module, partial(StackedExpertsForward, target.module)))


def _num_aligned(num_features: int, num_ranks: int) -> int | None:
    """The number of pieces of `_ALIGNED` features; `None` if they do not divide, or are too few for the ranks."""
    pieces, rest = divmod(num_features, _ALIGNED)
    return pieces if not rest and pieces >= num_ranks else None


class StackedExpertsForward(Forward):
    """Experts split by intermediate features. Tokens and routing weights are replicated, outputs are partial sums."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [self._replicated(value) for value in args]
        made: Tensor = self.original(*given, **{name: self._replicated(value) for name, value in kwargs.items()})
        return reduce_from(made, self.line)

    def _replicated(self, value: Any) -> Any:
        return copy_to(value, self.line) if isinstance(value, Tensor) and value.is_floating_point() else value
