"""Which tensor of a file is which of the model: by name, and every difference in one letter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.birth.files import WeightFiles, some
from shardwise.errors import ModelError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Match:
    """For names of the model, names in the file."""

    files: WeightFiles
    stored: Mapping[str, str]
    """By each parameter's and buffer's first name in the model."""


def match(model: nn.Module, files: WeightFiles, *, strict: bool) -> Match:
    """Find every parameter and persistent buffer of `model` in `files`.

    A tied parameter is found under any of its names. A prefix that a whole file has more or less than the model (a
    base model's file for a model with a head, `module.`) is added or taken away. Raises `ModelError`
    naming all that is missing, unexpected or of another shape; without `strict` only the last is an error.
    """
    names = _names(model)
    known = {name for all_names in names.values() for name in all_names}
    volatile = _volatile_buffers(model)
    renamed = _renamed(list(files.tensors), known)
    found: dict[str, str] = {}
    for first, all_names in names.items():
        stored = next((renamed[name] for name in all_names if name in renamed), None)
        if stored is not None:
            found[first] = stored
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = [_odd(name, tensors[name], files, found[name]) for name in found]
    missing = [name for name in names if name not in found and name not in volatile]
    ignored = [re.compile(pattern) for pattern in _patterns(model)]
    unexpected = [
        name
        for name in renamed
        if name not in known and name not in volatile and not any(pattern.search(name) for pattern in ignored)
    ]
    _refuse(files, [letter for letter in wrong if letter], missing if strict else (), unexpected if strict else ())
    return Match(files, {name: stored for name, stored in found.items() if name not in volatile})


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Every name that a parameter or buffer has, by its first."""
    firsts: dict[Tensor, str] = {}
    names: dict[str, list[str]] = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            names.setdefault(firsts.setdefault(tensor, name), []).append(name)
    return names


def _volatile_buffers(model: nn.Module) -> set[str]:
    """Buffers that no file has: they are worked out when the model is built."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _patterns(model: nn.Module) -> Iterable[str]:
    """What a model of transformers says may be in its files though it has no such tensor."""
    return getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()


def _renamed(stored: list[str], known: set[str]) -> dict[str, str]:
    """Names in the file by the names that they have in the model: with the prefix under which most are known."""

    def strip(prefix: str) -> dict[str, str]:
        return {name.removeprefix(prefix): name for name in stored}

    def add(prefix: str) -> dict[str, str]:
        return {name if name in known else prefix + name: name for name in stored}

    heads = {name.partition(".")[0] + "." for name in stored}
    candidates = [{name: name for name in stored}]
    candidates += [strip(head) for head in sorted(heads)]
    candidates += [add(head) for head in sorted({name.partition(".")[0] + "." for name in known})]
    whole = [one for one in candidates if len(one) == len(stored)]  # no two names fell together
    return max(whole, key=lambda one: sum(name in known for name in one))


def _odd(name: str, tensor: Tensor, files: WeightFiles, stored_name: str) -> str:
    stored = files.tensors[stored_name]
    if stored.shape != tuple(tensor.shape):
        return f"{name} is {list(tensor.shape)} in the model and {list(stored.shape)} in the file"
    if stored.dtype.is_floating_point != tensor.is_floating_point():
        return f"{name} is {tensor.dtype} in the model and {stored.dtype} in the file"
    return ""


def _refuse(files: WeightFiles, wrong: list[str], missing: Iterable[str], unexpected: Iterable[str]) -> None:
    said = list(wrong)
    if missing := list(missing):
        said.append(f"the files lack {some(missing)}")
    if unexpected := list(unexpected):
        said.append(f"the model lacks {some(unexpected)}")
    if said:
        hint = " With strict=False what one side lacks is passed over." if missing or unexpected else ""
        raise ModelError(f"{files.place} has weights of another model: {'; '.join(said)}.{hint}")
