"""Batches of another size for a rehearsal, so that what depends on it is told from what is as large by chance."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, count
from math import isqrt
from typing import Any

import torch
from torch import nn

from shardwise.runtime.nested import argument_tensors
from shardwise.system.torch_private import tree_map_only

Tensor = torch.Tensor
_UNLIKELY = (37, 41, 43, 47, 53, 59, 61)
_UNLIKELY_AND_FEWER = (17, 19, 23, 29, 31)


def size_unlike_others(model: nn.Module, batch: object, dim: int, size: int, multiple: int) -> int:
    """A number near `size`, which is that of dimension `dim` in `batch`: `multiple` times a prime that divides no other
    size in the model's parameters or in the batch, so that no product of these is a multiple of it. Smaller, if there
    is one."""
    sizes = {one for param in model.parameters() for one in param.shape}
    for tensor in argument_tensors(batch):
        sizes.update(one for place, one in enumerate(tensor.shape) if place != dim)
    sizes.discard(0)
    sizes.add(multiple)
    smaller = range(size // multiple + (0 if size % multiple else -1), 1, -1)
    near = chain(smaller, count(size // multiple + 1))
    return multiple * next(one for one in near if _is_prime(one) and all(other % one for other in sizes))


def unlikely_size(batch: object, *, fewer: bool = False) -> int:
    """A number of samples of which sizes in models are hardly multiples, and those of the batch are not; `fewer`:
    another one. The same on all ranks that share the batch, while they have other parts of the model."""
    sizes = {size for tensor in argument_tensors(batch) for size in tensor.shape[1:]} - {0}
    unlikely = _UNLIKELY_AND_FEWER if fewer else _UNLIKELY
    return next((one for one in unlikely if all(size % one for size in sizes)), unlikely[0])


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, isqrt(number) + 1))


def resized(batch: Any, dim: int, size: int, other: int, *, kept: Collection[int] = ()) -> Any:
    """`batch` with `other` entries in dimension `dim` of all tensors that have `size` there, but not of those whose
    identities are `kept`. Integers, of which a rehearsal may read the values, are repeated; others only have a
    shape."""

    def changed(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim or tensor.shape[dim] != size or id(tensor) in kept:
            return tensor
        if other <= size:
            return tensor.narrow(dim, 0, other)
        if tensor.is_floating_point():
            shape = list(tensor.shape)
            shape[dim] = other
            return tensor.narrow(dim, 0, 1).expand(shape)
        return tensor.index_select(dim, torch.arange(other, device=tensor.device) % size)

    return tree_map_only(Tensor, changed, batch)
