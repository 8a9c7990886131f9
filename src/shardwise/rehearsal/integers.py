"""Tensors without bytes, but for small integers: those are computed.

[Note: integers] What a model decides by is mostly made of integers: is any position masked, do positions start anew,
how long is the longest row. They are small, so token ids, masks and positions keep their values, and code that asks for
them gets the answer that it gets in training. (transformers asks whether a tensor is a fake one, and if so takes masks
that training does not need.) What floating-point numbers are is never known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALL_NUMEL = 2**22
"""Larger integer tensors (one-hot vectors, a mask for every head) have no values: a rehearsal takes no memory."""


class Integers(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Above a `FakeTensorMode`: operations on small integers alone, with small integers as a result, are carried out.

    Random ones are not, as a rehearsal draws no numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_drawn = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if is_drawn or not all(_has_values(tensor) for tensor in _tensors((args, kwargs))):
            return func(*args, **(kwargs or {}))
        try:
            foreseen = func(*args, **(kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException):
            foreseen = None  # the values decide
        if not all(_is_small_integers(tensor) for tensor in _tensors(foreseen)):
            return foreseen
        with unset_fake_temporarily():
            return func(*args, **(kwargs or {}))


def like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A twin on `device` with the shape, strides, dtype and wish for a gradient of `tensor`.

    It has values where those are small integers that are known, and else no bytes.
    """
    if _is_small_integers(tensor) and _has_values(tensor):
        with unset_fake_temporarily():
            return tensor.detach().clone().to(device)
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, requires_grad=tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _has_values(tensor: torch.Tensor) -> bool:
    return not (isinstance(tensor, FakeTensor) or tensor.is_meta or _is_inexact(tensor))


def _is_small_integers(tensor: torch.Tensor) -> bool:
    return not _is_inexact(tensor) and tensor.numel() <= SMALL_NUMEL


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
