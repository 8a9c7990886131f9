"""Weights that transformers renames, stacks or splits while it loads them: Mixtral's experts, the layers of ViT.

Since version 5 the library has a list of such conversions for each model (`transformers.conversion_mapping`), which
`from_pretrained` and `save_pretrained` use. The same list is applied here, to one parameter at a time.
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
from shardwise.init.safetensors_headers import Stored

Tensor = torch.Tensor
FAILURES = (ValueError, TypeError, LookupError, RuntimeError, AttributeError, ArithmeticError)
"""Errors of the library's operations on tensors that they do not expect."""


@dataclass(frozen=True)
class Recipe:
    """How tensors of the files become one or several tensors of the model, by an operation of transformers.

    `sources` are its inputs in order: the pattern of a name, and the name of a tensor that matches it.
    """

    target: str
    converter: Any = field(repr=False)
    sources: tuple[tuple[str, str], ...]

    def shapes(self, model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
        """Shapes of the results, by names of the model; empty if the operation does not fit these tensors."""
        metas = {
            name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for _, name in self.sources
        }
        try:
            return {name: tuple(one.shape) for name, one in self._run(model, metas).items()}
        except FAILURES:
            return {}

    def make(self, model: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Tensor]:
        """The resulting tensors, by names of the model."""
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
    """For names of the model, names in the files; and recipes for tensors that are made of several or of parts."""

    renamed: dict[str, str]
    recipes: tuple[Recipe, ...]


def conversions_of(model: nn.Module, stored: Sequence[str], known: set[str]) -> Conversions | None:
    """The conversions that transformers would apply to tensors with the names `stored`; `None` if it has none.

    Follows its `convert_and_load_state_dict_in_model`.
    """
    if not hasattr(model, "config") or not hasattr(model, "base_model_prefix"):
        return None
    try:
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        loading: Any = importlib.import_module("transformers.core_model_loading")
        transforms = mapping.get_model_conversion_mapping(model)
        rename = loading.rename_source_key
    except (ImportError, AttributeError):  # versions before 5 have no such list
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
    """A sort key that puts expert 10 after expert 9."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"\.", name)]
