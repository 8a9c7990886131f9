"""Arrays of numpy, and of whoever hands out buffers, as torch tensors and back; without a copy where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor
_NARROW = {"bfloat16": (torch.bfloat16, torch.int16, np.int16)}


def to_torch(array: Any) -> Tensor:
    """`array` as a tensor; read-only memory is copied, since torch knows none."""
    given = np.asarray(array)
    if given.dtype.name in _NARROW:
        dtype, _, bits = _NARROW[given.dtype.name]
        return torch.from_numpy(_own(given.view(bits))).view(dtype)
    return torch.from_numpy(_own(given))


def _own(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous or not array.flags.writeable:
        return array.copy(order="C")
    return array


def to_numpy(tensor: Tensor, dtype: Any = None) -> np.ndarray:
    """`tensor` as an array. `dtype` is one that numpy knows by another package, such as `ml_dtypes.bfloat16`."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()
