"""What an optimizer is set to, in plain values: for ranks to compare."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

Plain = bool | int | float | str | None | tuple[float, ...]
_SHOWN = ("lr", "weight_decay")
_MOST_SHOWN = 3
"""So many different values of one setting are shown, where groups differ."""


def hyperparameters(optimizer: torch.optim.Optimizer) -> dict[str, Plain]:
    """Its class and every plain setting of every group: `{"class": "SGD", "groups": 1, "group 0 lr": 0.1, ...}`.

    A setting that is a tensor on a GPU is left out: to look at it would wait for the GPU.
    """
    said: dict[str, Plain] = {"class": type(optimizer).__name__, "groups": len(optimizer.param_groups)}
    for number, group in enumerate(optimizer.param_groups):
        said |= {f"group {number} {key}": value for key, value in _settings(group)}
    return said


def hyper_digest(optimizer: torch.optim.Optimizer) -> str:
    """The same in a few words and a checksum, such as `a step of SGD with lr 0.1 (1f0e22c8)`."""
    groups = [dict(_settings(group)) for group in optimizer.param_groups]
    shown = []
    for key in _SHOWN:
        values = list(dict.fromkeys(group[key] for group in groups if key in group))
        if values:
            more = ", ..." if len(values) > _MOST_SHOWN else ""
            shown.append(f"{key} {', '.join(map(repr, values[:_MOST_SHOWN]))}{more}")
    name = type(optimizer).__name__
    said = f" with {' and '.join(shown)}" if shown else ""
    return f"a step of {name}{said} ({zlib.crc32(repr((name, groups)).encode()):08x})"


def _settings(group: dict[str, object]) -> Iterator[tuple[str, Plain]]:
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and value.device.type == "cpu":
                yield key, value.item()
        elif value is None or isinstance(value, bool | int | float | str):
            yield key, value
        elif isinstance(value, tuple) and all(isinstance(each, int | float) for each in value):
            yield key, value
