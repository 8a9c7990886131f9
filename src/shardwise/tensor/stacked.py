"""Stacked experts of transformers models, cut by features where the model's own tensor-parallel plan says so.

Every rank has all experts, but only some of their intermediate features, so what a rank's experts return is a summand.
Facts about that library, which is not imported: its style for the module, and what its styles mean for parameters of
shape [experts, ., .].
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.placement import Box
from shardwise.tensor.forwards import Forward
from shardwise.tensor.functions import copy_to, reduce_from
from shardwise.tensor.rules import Cut, brought_rules, fits
from shardwise.tensor.shares import AXIS, deal
from shardwise.tensor.split import Split
from shardwise.tensor.tables import EXPERTS_STYLE, STACKED_STYLES

Tensor = torch.Tensor
_ALIGNED = 8
"""Features that stay together: torch's grouped products take rows of multiples of 16 bytes."""


@dataclass(frozen=True)
class StackedCut:
    """Experts that are cut. `params` by name: the dimension that is cut, and how many matrices are fused along it."""

    path: str
    module: nn.Module
    params: Mapping[str, tuple[int, int]]


def stacked_cuts(model: nn.Module, brought: Mapping[str, str]) -> Iterator[StackedCut]:
    """The experts that the model's own plan cuts, without any module that stays as it is.

    Raises `ModelError` for experts with parameters of which the plan does not say how they are cut.
    """
    owners = [pattern for pattern, style in brought.items() if style == EXPERTS_STYLE]
    for path, module in model.named_modules():
        if not any(fits(path, pattern) for pattern in owners):
            continue
        params = {}
        for name, param in module.named_parameters():
            style = next((style for pattern, style in brought.items() if fits(f"{path}.{name}", pattern)), None)
            if style not in STACKED_STYLES or param.dim() != 3:
                raise ModelError(
                    f"The tensor-parallel plan that {type(model).__name__} brings does not cut {path}.{name} with the "
                    f"other parameters of its experts. Add an axis ep to the mesh, along which ranks have whole "
                    f"experts and copies of them along {AXIS}, or give a plan of your own: tensor.plan."
                )
            params[name] = STACKED_STYLES[style]
        if params:
            yield StackedCut(path, module, params)


def cut_stacked(split: Split, model: nn.Module, apart: Collection[str]) -> None:
    """Note the experts of `model` that its own plan cuts, but for modules `apart`."""
    for cut in stacked_cuts(model, brought_rules(model, apart)):
        if split.blocks:
            raise ModelError(
                f"{cut.path} has experts, which tensor.sequence cannot give whole sequences. Leave tensor.sequence out "
                f"of the plan."
            )
        for name, (dim, num_parts) in cut.params.items():
            param = cut.module.get_parameter(name)
            together = _dealt_together(param.shape[dim] // num_parts, split.num_ranks)
            shares = deal(
                Cut(cut.path, cut.module, "column", num_parts, heads=together), param.shape[dim], split.num_ranks
            )
            split.boxes[param] = Box.cut(tuple(param.shape), dim, shares.ranges[split.place], 1, 0)
            split.cut_by[param] = cut.path
        split.forwards.append((cut.module, partial(Stacked, cut.module)))


def _dealt_together(num_features: int, num_ranks: int) -> int | None:
    """Into how many pieces of `_ALIGNED` features the features are divided; `None` if they cannot be."""
    pieces, rest = divmod(num_features, _ALIGNED)
    return pieces if not rest and pieces >= num_ranks else None


class Stacked(Forward):
    """Experts of which each rank has some of the intermediate features: what they make of replicated tokens and weights
    is a summand."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        given = [self._read(value) for value in args]
        made: Tensor = self.original(*given, **{name: self._read(value) for name, value in kwargs.items()})
        return reduce_from(made, self.line)

    def _read(self, value: Any) -> Any:
        return copy_to(value, self.line) if isinstance(value, Tensor) and value.is_floating_point() else value
