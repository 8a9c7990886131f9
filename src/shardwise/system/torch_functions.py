"""Torch's functions by name, and the dimensions along which a call works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

Function = Callable[..., Any]


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
