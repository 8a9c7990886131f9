"""The settings of an optimizer in plain values, for ranks to compare."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

Plain = bool | int | float | str | None | tuple[float, ...]
_PLAIN = frozenset({bool, int, float, str, type(None)})
_Typed = tuple[tuple[str, type, Plain], ...]
_SHOWN = ("lr", "weight_decay")
_MOST_SHOWN = 3
"""How many different values of one setting are shown, if groups differ."""


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Plain]:
    """Its class and every plain setting of every group: `{"class": "SGD", "groups": 1, "group 0 lr": 0.1, ...}`.

    A setting that is a tensor on a GPU is left out: reading it would wait for the GPU.
    """
    found: dict[str, Plain] = {"class": type(optimizer).__name__, "groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        found |= {f"group {number} {key}": value for key, value in _settings(group)}
    return found


def hyper_digest(optimizer: torch.optim.Optimizer) -> str:
    """The settings as a few words and a checksum, such as `a step of SGD with lr 0.1 (1f0e22c8)`."""
    return _in_words(type(optimizer).__name__, tuple(_typed(group) for group in optimizer.param_groups))


def _typed(group: dict[str, Any]) -> _Typed:
    """With their types, because 1 and 1.0 are equal but printed differently, and the cache must not confuse them."""
    return tuple((key, type(value), value) for key, value in _settings(group))


@lru_cache(maxsize=16)
def _in_words(name: str, groups: tuple[_Typed, ...]) -> str:
    """Cached, because most steps have the same settings: formatting a float takes longer than comparing it."""
    plain = [{key: value for key, _, value in group} for group in groups]
    shown = []
    for key in _SHOWN:
        values = list(dict.fromkeys(group[key] for group in plain if key in group))
        if values:
            more = ", ..." if len(values) > _MOST_SHOWN else ""
            shown.append(f"{key} {', '.join(map(repr, values[:_MOST_SHOWN]))}{more}")
    words = f" with {' and '.join(shown)}" if shown else ""
    return f"a step of {name}{words} ({zlib.crc32(repr(plain).encode(), zlib.crc32(name.encode())):08x})"


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, Plain]]:
    for key, value in group.items():
        kind = type(value)
        if kind in _PLAIN:
            yield key, value
        elif kind is tuple and all(type(each) in (int, float) for each in value):
            yield key, tuple(map(float, value))
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            yield key, value.item()
