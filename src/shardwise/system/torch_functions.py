"""Torch's functions by name, the dimensions along which a call works, and whose call it is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.nn import functional

import shardwise.errors

Function = Callable[..., Any]
_TORCH, _OURS = (f"{Path(str(module.__file__)).parent}{os.sep}" for module in (torch, shardwise.errors))


def named(*names: str) -> set[Function]:
    """The functions of these names, and the methods of tensors."""
    owners = (torch, torch.Tensor, functional, torch.linalg)
    return {getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)}


def dims_of(
    given: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], place: int, default: int | None = None
) -> list[int]:
    """The dimensions of `given`, the first of `args`, that a call is told to work along by its argument `dim`, which is
    at `place`; none if it works on all elements, or with another tensor."""
    dims = kwargs.get("dim", kwargs.get("dims", args[place] if len(args) > place else default))
    several = dims if isinstance(dims, list | tuple) else [dims]
    return [one % given.dim() for one in several if isinstance(one, int) and not isinstance(one, bool) and given.dim()]


def is_called_by_us() -> bool:
    """Whether the call that a mode's `__torch_function__` is handling is this library's, maybe through torch's own.
    Other modes, through which it came, do not count. For tensors in a loop's hands, on which torch calls
    `__torch_function__` wherever they are; what we compute inside of a forward is `unwatched` instead, because there
    torch's frames may lie between us and the model's own calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_function__":
        frame = frame.f_back
    while frame is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_OURS)


def is_called_by(name: str) -> bool:
    """Whether the call that a tensor's `__torch_function__` is handling is made by a function of this name."""
    frame = _caller()
    return frame is not None and frame.f_code.co_name == name


def is_called_by_torch() -> bool:
    """Whether that call is made by a function of torch's, whoever has called that."""
    frame = _caller()
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)


def is_called_within(module: str) -> bool:
    """Whether a function of `module`, by its name, is among those that are running on this thread."""
    if module not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _caller() -> FrameType | None:
    """What has called the innermost `__torch_function__` that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name.strip("_") != "torch_function":
        frame = frame.f_back
    while frame is not None and frame.f_code.co_name.strip("_") == "torch_function":
        frame = frame.f_back
    return frame
