"""Conversion between arrays and torch tensors, without a copy if possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


def to_torch(array: Any) -> Tensor:
    """`array` as a tensor. Read-only memory is copied, since torch does not support it."""
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(_writable(array.view(np.int16))).view(torch.bfloat16)
    return torch.from_numpy(_writable(array))


def _writable(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous or not array.flags.writeable:
        return array.copy(order="C")
    return array


def to_numpy(tensor: Tensor, dtype: Any) -> np.ndarray:
    """`tensor` as an array. `dtype` is for bfloat16: another package defines it for numpy, such as `ml_dtypes`."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()
