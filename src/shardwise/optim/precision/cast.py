"""Casting inputs to the dtype in which the model computes."""

from __future__ import annotations

import copy
import operator
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast to `dtype`; searches tuples, lists, mappings and dataclasses.

    What has no such tensor is returned as it is, because a model may write to it; the rest is copied.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, list | tuple):
        items = [cast_floating(item, dtype) for item in value]
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, MutableMapping):  # also what transformers' processors return
        changes = _changes(value, dtype)
        cast = copy.copy(value) if changes else value
        for key, item in changes.items():
            cast[key] = item
        return cast
    if is_dataclass(value) and not isinstance(value, type):
        held = {one.name: getattr(value, one.name) for one in fields(value) if hasattr(value, one.name)}
        changes = _changes(held, dtype)
        changed = copy.copy(value) if changes else value
        for name, item in changes.items():
            object.__setattr__(changed, name, item)  # of a frozen one, too
        return changed
    return value


def _changes(items: MutableMapping[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    cast = {key: cast_floating(item, dtype) for key, item in items.items()}
    return {key: item for key, item in cast.items() if item is not items[key]}
