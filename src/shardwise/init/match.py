"""Matches tensors of files with those of a model by name, and reports every difference in one text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.errors import ModelError, some
from shardwise.init.converted import Conversions, Recipe, conversions_of
from shardwise.init.files import WeightFiles
from shardwise.plan.placement import Span

Tensor = torch.Tensor


@dataclass
class Match:
    """Where each parameter and buffer of a model is found in files, by its first name in the model.

    `note` is a sentence for the user if anything of the model or of the files is left over.
    """

    model: nn.Module
    files: WeightFiles
    stored: Mapping[str, str]
    """Names in the file."""
    made: Mapping[str, Recipe] = field(default_factory=dict)
    """Recipes for tensors that are not in the files as such, but are made of tensors that are."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The names that recipes use for the tensors that they make."""
    note: str = ""
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    _last: tuple[Recipe, dict[str, Tensor]] | None = None

    def __contains__(self, name: str) -> bool:
        return name in self.stored or name in self.made

    def __iter__(self) -> Iterator[str]:
        yield from (*self.stored, *self.made)

    def read(self, name: str, span: Span) -> Tensor:
        """Elements `span` of the tensor, flat, on the CPU, in the file's dtype.

        A recipe's tensors are made whole and kept until another recipe is needed, since one recipe may make several.
        """
        if name in self.stored:
            return self.files.read(self.stored[name], span)
        recipe = self.made[name]
        if self._last is None or self._last[0] is not recipe:
            self._last = None  # free the previous one first
            self._last = recipe, recipe.make(self.model, self.files.tensors)
            self.files.bytes_read += sum(self.files.tensors[source].num_bytes for _, source in recipe.sources)
        return self._last[1][self.names[name]].reshape(-1)[span.as_slice]

    def let_go(self) -> None:
        """Free cached tensors."""
        self._last = None


def match(model: nn.Module, files: WeightFiles, *, strict: bool) -> Match:
    """Find every parameter and persistent buffer of `model` in `files`.

    A tied parameter is found under any of its names. A prefix that all names of the file have or lack (a base model's
    file for a model with a head, `module.`) is removed or added. Tensors that transformers renames or combines while
    loading are found as there. Raises `ModelError` with everything that is missing, unexpected or of another shape;
    without `strict` only a different shape is an error, and the rest is in `note`.
    """
    names = _names(model)
    known = {name for all_names in names.values() for name in all_names}
    volatile = _volatile_buffers(model)
    found = _Found(model, files, names, known)
    missing = [name for name in names if name not in found.homes and name not in volatile]
    unexpected = _unexpected(model, found.strangers, volatile)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = [_odd(name, tensors[name], *found.homes[name]) for name in found.homes]
    _refuse(files, [text for text in wrong if text], missing if strict else (), unexpected if strict else ())
    return Match(
        model,
        files,
        {name: stored for name, stored in found.stored.items() if name not in volatile},
        {name: recipe for name, (recipe, _) in found.made.items() if name not in volatile},
        {name: target for name, (_, target) in found.made.items()},
        _note(files, missing, unexpected),
        missing,
        unexpected,
    )


def _unexpected(model: nn.Module, strangers: Iterable[str], volatile: Collection[str]) -> list[str]:
    """Names in the files that the model lacks, except those that it declares as ignored."""
    ignored = [re.compile(pattern) for pattern in _patterns(model)]
    named = [name for name in strangers if name not in volatile]
    return [name for name in named if not any(pattern.search(name) for pattern in ignored)]


class _Found:
    """The tensors of the model that were found in the files: under their own names, or by transformers' conversions."""

    def __init__(self, model: nn.Module, files: WeightFiles, names: dict[str, list[str]], known: set[str]) -> None:
        self.stored: dict[str, str] = {}
        self.made: dict[str, tuple[Recipe, str]] = {}
        self.homes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        """Shapes and dtypes by the model's first names."""
        renamed = _renamed(list(files.tensors), known)
        recipes: tuple[Recipe, ...] = ()
        if renamed.keys() != known:
            conversions = conversions_of(model, list(files.tensors), known)
            if conversions is not None and _fits(conversions, known) > sum(name in known for name in renamed):
                renamed, recipes = conversions.renamed, conversions.recipes
        outcomes = {
            target: (recipe, shape)
            for recipe in recipes
            for target, shape in recipe.shapes(model, files.tensors).items()
        }
        for first, all_names in names.items():
            for name in all_names:
                if name in renamed:
                    self.stored[first] = renamed[name]
                    self.homes[first] = (files.tensors[renamed[name]].shape, files.tensors[renamed[name]].dtype)
                    break
                if name in outcomes:
                    recipe, shape = outcomes[name]
                    self.made[first] = (recipe, name)
                    self.homes[first] = (shape, files.tensors[recipe.sources[0][1]].dtype)
                    break
        self.strangers = [name for name in renamed if name not in known]
        used = {id(recipe) for recipe, _ in self.made.values()}
        self.strangers += [source for one in recipes if id(one) not in used for _, source in one.sources]


def _fits(conversions: Conversions, known: set[str]) -> int:
    """How many tensors of the files have a place in the model."""
    renamed = sum(name in known for name in conversions.renamed)
    return renamed + sum(len(recipe.sources) for recipe in conversions.recipes)


def _note(files: WeightFiles, missing: list[str], unexpected: list[str]) -> str:
    """A sentence about what `strict=False` ignores; empty if there is nothing."""
    problems = []
    if missing:
        problems.append(f"the files lack {some(missing)}, which keep the values of a new model (random, mostly)")
    if unexpected:
        problems.append(f"the model lacks {some(unexpected)}, which are not used")
    return f"{files.path}: {'; '.join(problems)}." if problems else ""


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and buffer, by the first of them."""
    firsts: dict[Tensor, str] = {}
    names: dict[str, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names.setdefault(firsts.setdefault(tensor, name), []).append(name)
    return names


def _volatile_buffers(model: nn.Module) -> set[str]:
    """Non-persistent buffers, which no file has: they are computed when the model is built."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _patterns(model: nn.Module) -> Iterable[str]:
    """The patterns of names that a transformers model ignores in its files."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def _renamed(stored: list[str], known: set[str]) -> dict[str, str]:
    """Names in the file by their names in the model, with the prefix for which most are known."""

    def strip(prefix: str) -> dict[str, str]:
        return {name.removeprefix(prefix): name for name in stored}

    def add(prefix: str) -> dict[str, str]:
        return {name if name in known else prefix + name: name for name in stored}

    heads = {name.partition(".")[0] + "." for name in stored}
    candidates = [{name: name for name in stored}]
    candidates += [strip(head) for head in sorted(heads)]
    candidates += [add(head) for head in sorted({name.partition(".")[0] + "." for name in known})]
    whole = [one for one in candidates if len(one) == len(stored)]  # no two names became equal
    return max(whole, key=lambda one: sum(name in known for name in one))


def _odd(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if shape != tuple(tensor.shape):
        return f"{name} is {list(tensor.shape)} in the model and {list(shape)} in the file"
    if dtype.is_floating_point != tensor.is_floating_point():
        return f"{name} is {tensor.dtype} in the model and {dtype} in the file"
    return ""


def _refuse(files: WeightFiles, wrong: list[str], missing: Iterable[str], unexpected: Iterable[str]) -> None:
    problems = list(wrong)
    if missing := list(missing):
        problems.append(f"the files lack {some(missing)}")
    if unexpected := list(unexpected):
        problems.append(f"the model lacks {some(unexpected)}")
    if problems:
        hint = ""
        if missing and unexpected:
            hint = (
                " If these are the same tensors under other names, rename them in the file, or load the model with its "
                "own from_pretrained and shard that: with strict=False what they lack would keep its initial values."
            )
        elif missing or unexpected:
            hint = " strict=False accepts that; what the files lack keeps its initial values."
        raise ModelError(f"{files.path} has weights of another model: {'; '.join(problems)}.{hint}")
