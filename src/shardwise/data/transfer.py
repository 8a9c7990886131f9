"""Batches on their way to a device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor


def pinned(batch: Any, device: torch.device) -> Any:
    """The batch in page-locked memory, from which a GPU copies while the host goes on.

    The thread that pins says which GPU it means: without that, the threads of all ranks open a context on the
    first one.
    """
    with torch.cuda.device(device):
        return on_tensors(batch, Tensor.pin_memory)


def moved(batch: Any, device: torch.device) -> Any:
    """The batch on `device`. What is pinned is copied in the order of the current stream, the host goes on."""
    return on_tensors(batch, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))


def on_tensors(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples, lists, dataclasses and mappings around changed tensors; anything else stays as it is."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)  # of its own class: a BatchEncoding of transformers stays one
        changed.update({key: on_tensors(value, change) for key, value in batch.items()})
        return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_tensors(value, change) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(on_tensors(value, change) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: on_tensors(getattr(batch, name), change) for name in fields})
    return batch
