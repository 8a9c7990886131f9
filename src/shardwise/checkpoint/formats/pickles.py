"""Plain data from foreign pickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MAX_DEPTH, MAX_ITEMS = 32, 10**6


def as_plain(value: Any) -> Any:
    """`value` as JSON data. Raises `TypeError` if JSON cannot hold it, or if it is too large."""
    return _plain(value, MAX_DEPTH, [MAX_ITEMS])


def _plain(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        raise TypeError("it is too large, or nested too deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item, depth - 1, left) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, depth - 1, left) for key, item in value.items()}
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return value.item()
    raise TypeError(f"{type(value).__name__} is not plain")


def plain_items(values: Mapping[Any, Any]) -> tuple[dict[str, Any], list[str]]:
    """The items of `values` that JSON can hold, and the names of the others."""
    plain: dict[str, Any] = {}
    others: list[str] = []
    for key, value in values.items():
        try:
            if not isinstance(key, str):
                raise TypeError("its name is no text")
            plain[key] = as_plain(value)
        except TypeError:
            others.append(str(key) if isinstance(key, str | int | float) else type(key).__name__)
    return plain, others
