"""Weights that transformers renames, stacks or splits while it loads them: Mixtral's experts, the layers of ViT.

Since its version 5 the library has a list of such conversions for each model (`transformers.conversion_mapping`), by
which `from_pretrained` reads and `save_pretrained` writes. The same list is applied here, to one parameter at a time.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import CheckpointError
from shardwise.init.heads import Stored

Tensor = torch.Tensor
FAILURES = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, ArithmeticError)
"""What the library's operations raise where the tensors of a file are not those that they expect."""


@dataclass(frozen=True)
class Recipe:
    """How tensors of the files become one or several of the model: an operation of the transformers library.

    `sources` are what it takes, in its order: the pattern of a name, and a tensor of that name.
    """

    target: str
    converter: Any = field(repr=False)
    sources: tuple[tuple[str, str], ...]

    def shapes(self, model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
        """What comes of it, by names of the model; empty if the operation does not fit these tensors."""
        metas = {
            name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for _, name in self.sources
        }
        try:
            return {name: tuple(one.shape) for name, one in self._run(model, metas).items()}
        except FAILURES:
            return {}

    def make(self, model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
        """The tensors themselves, by names of the model."""
        whole = {name: tensors[name].read().view(tensors[name].shape) for _, name in self.sources}
        try:
            return self._run(model, whole)
        except FAILURES as error:
            raise CheckpointError(f"{self.target} could not be made from {self.sources[0][1]}: {error}") from error

    def _run(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.target, name, pattern, tensors[name])
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


@dataclass(frozen=True)
class Conversions:
    """For names of the model, names in the files; and recipes for what is made of several of them or of parts."""

    renamed: dict[str, str]
    recipes: tuple[Recipe, ...]


def conversions_of(model: nn.Module, stored: Sequence[str], known: set[str]) -> Conversions | None:
    """What transformers would do with tensors of the names `stored`; `None` if it has nothing to say on this model.

    As in its `convert_and_load_state_dict_in_model`.
    """
    if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        return None
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
        transforms = mapping.get_model_conversion_mapping(model)
        rename = loading.rename_source_key
    except (ImportError, AttributeError):  # before version 5 there was no such list
        return None
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    there = dict.fromkeys(known, True)
    renamed: dict[str, str] = {}
    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(stored, key=_natural):
        target, pattern = rename(name, renamings, converters, model.base_model_prefix, there)
        if target not in known and name in known:
            target, pattern = name, None
        if pattern is None:
            renamed.setdefault(target, name)
        else:
            collected.setdefault(target, (by_pattern[pattern], []))[1].append((pattern, name))
    recipes = (Recipe(target, converter, tuple(sources)) for target, (converter, sources) in collected.items())
    return Conversions(renamed, tuple(recipes))


def _natural(name: str) -> list[tuple[int, str | int]]:
    """Expert 10 is behind expert 9."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"\.", name)]
