"""A transformers model's tensors as its files have them: Mixtral's experts one by one, ViT's layers by their old names.

Since version 5 the library loads many models under other names, stacked or split, and `save_pretrained` reverts that.
Its own function is asked here for each tensor alone, without memory, so that weights can be written as they arrive.
Tensors that only together make one of a file's are kept until the last of them is there.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.formats.rearrangement import Group, Rearrangement
from shardwise.init.converted import FAILURES

Tensor = torch.Tensor
Revert = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def reversal_of(model: nn.Module, likes: Mapping[str, Tensor]) -> Rearrangement | None:
    """For tensors with the names, shapes and dtypes of `likes`, which arrive in that order; `None` if files have the
    same as the model."""
    if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        return None
    try:
        reverting: Any = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    except (ImportError, AttributeError):  # versions before 5 convert nothing
        return None

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made: dict[str, Tensor] = reverting(model, tensors)
        return made

    metas = {name: torch.empty_like(one, device="meta") for name, one in likes.items()}
    try:
        whole = revert(dict(metas))
    except FAILURES:
        return None
    if {name: one.shape for name, one in whole.items()} == {name: one.shape for name, one in metas.items()}:
        return None
    groups = _groups(revert, metas, whole)
    made = [name for group in groups for name in group.made]
    if len(made) != len(set(made)) or set(made) != set(whole):
        return None
    return Rearrangement(groups, likes)


def _groups(revert: Revert, metas: dict[str, Tensor], whole: dict[str, Tensor]) -> list[Group]:
    """As small as they can be: a tensor alone, those with the same number of a layer, or all that is left."""
    found: list[Group] = []
    layers: dict[str, list[str]] = {}
    for name in metas:
        group = _fitting(revert, [name], metas, whole)
        if group is None:
            number = re.search(r"\.\d+\.", name)
            layers.setdefault(number[0] if number else "", []).append(name)
        else:
            found.append(group)
    rest: list[str] = []
    for names in layers.values():
        group = _fitting(revert, names, metas, whole)
        if group is None:
            rest += names
        else:
            found.append(group)
    last = _fitting(revert, rest, metas, whole) if rest else None
    return found if last is None else [*found, last]


def _fitting(revert: Revert, names: list[str], metas: dict[str, Tensor], whole: dict[str, Tensor]) -> Group | None:
    """These tensors as a group, if what is made of them is part of what is made of all."""
    try:
        made = revert({name: metas[name] for name in names})
    except FAILURES:
        return None
    fits = made and all(name in whole and one.shape == whole[name].shape for name, one in made.items())
    return Group(tuple(names), made, revert) if fits else None
