"""Batches of another size for a rehearsal, so that what depends on it is told from what is as large by chance."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from shardwise.runtime.nested import argument_tensors
from shardwise.system.torch_private import tree_map_only

Tensor = torch.Tensor
_UNLIKELY = (37, 41, 43, 47, 53, 59, 61)


def size_unlike_others(model: nn.Module, batch: object, dim: int, size: int, multiple: int) -> int:
    """A number near `size`, which is that of dimension `dim` in `batch`, of which no other size in the model's
    parameters or in the batch is a multiple. Smaller, if there is one. It is a multiple of `multiple` itself."""
    sizes = {one for param in model.parameters() for one in param.shape}
    for tensor in argument_tensors(batch):
        sizes.update(one for place, one in enumerate(tensor.shape) if place != dim)
    sizes.discard(0)
    candidates = [one for one in (*range(size - 1, 1, -1), *range(size + 1, 4 * size + 99)) if not one % multiple]
    return next((one for one in candidates if all(other % one for other in sizes)), size + multiple)


def unlikely_size(batch: object) -> int:
    """A number of samples of which sizes in models are hardly multiples, and those of the batch are not. The same on
    all ranks that share the batch, while they have other parts of the model."""
    sizes = {size for tensor in argument_tensors(batch) for size in tensor.shape[1:]} - {0}
    return next((one for one in _UNLIKELY if all(size % one for size in sizes)), _UNLIKELY[0])


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
