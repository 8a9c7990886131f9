"""Tensors without bytes, except for small integers, which have values.

[Note: integers] The data that a model branches on is mostly integers: whether a position is masked, whether positions
restart, how long the longest row is. They are small, so token ids, masks and positions keep their values, and code that
reads them gets the answer that it gets in training. (transformers checks whether a tensor is fake, and if so uses masks
that training does not need.) Floating-point values are never known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.system.marked import Marked
from shardwise.system.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UncompiledMode,
    tree_leaves,
    unset_fake_temporarily,
)

SMALL_NUMEL = 2**22
"""Larger integer tensors (one-hot vectors, a mask for every head) have no values, so that a rehearsal needs no
memory."""


class Integers(UncompiledMode):
    """Above a `FakeTensorMode`: runs operations whose inputs and outputs are all small integers.

    Random ones are not run, because a rehearsal draws no numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(isinstance(one, torch.Tensor) and not _has_values(one) for one in args):
            return func(*args, **(kwargs or {}))  # as most do: nothing more need be looked at
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if is_drawn or not all(_has_values(tensor) for tensor in _tensors((args, kwargs))):
            return func(*args, **(kwargs or {}))
        try:
            foreseen = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            foreseen = None  # depends on the values
        if not all(is_small_integers(tensor) for tensor in _tensors(foreseen)):
            return foreseen
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


def like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` with the shape, strides, dtype and `requires_grad` of `tensor`.

    It has values if those are known small integers, otherwise no bytes.
    """
    if is_small_integers(tensor) and _has_values(tensor):
        with unset_fake_temporarily():
            plain = tensor.plain() if isinstance(tensor, Marked) else tensor  # a model computes with plain ones
            return plain.detach().clone().to(device)
    dtype = torch.float64 if is_small_integers(tensor) else tensor.dtype  # small integers would be what is in memory
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device).to(tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _has_values(tensor: torch.Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta or _is_inexact(tensor))


def is_small_integers(tensor: torch.Tensor) -> bool:
    return not _is_inexact(tensor) and tensor.numel() <= SMALL_NUMEL


def _is_inexact(tensor: torch.Tensor) -> bool:
    dtype = tensor.dtype
    return dtype.is_floating_point or dtype.is_complex
